"""The kinds of gates, what each of them predicts, and where Fast KVzip's are published; needs no
PyTorch.
"""

# The evictor whose scores each kind predicts.
TARGETS = {"fastkvzip": "kvzip", "kvzap-linear": "kvzip+", "kvzap-mlp": "kvzip+"}
KINDS = tuple(TARGETS)
FAST_KVZIP = "Jang-Hyun/Fast-KVzip"  # on the hub
