"""The settings that the tiny model's adapters are trained with; paper/log.md says where and why
they differ from the paper's.
"""

from __future__ import annotations

from dataclasses import replace

from restorekv.train.config import TrainConfig

CONTEXTS = 500  # training documents
# Lengths of the documents, in tokens.
SHORTEST = 512
LONGEST = 1280
SHIPPED = TrainConfig(
    restore_tokens=3,
    rank=16,
    alpha=32,
    lr=4e-3,
    warmup=20,
    steps=500,
    contexts=8,
    questions=4,
    ratio_min=0.025,
    ratio_max=0.25,
    max_new_tokens=48,
    keep=CONTEXTS,
)
# Half the contexts in a step of the shipped adapters' training, to save time.
ABLATIONS = replace(SHIPPED, contexts=4)
