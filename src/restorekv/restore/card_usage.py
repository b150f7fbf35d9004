"""What a model card says on using the adapter: here, and in kvpress 0.5.5."""

from __future__ import annotations

import json
import shlex

from peft import LoraConfig

from restorekv.restore.adapter_file import Card

KVPRESS_SUFFIXES = {"kvzip": "", "kvzip+": "_plus"}  # the evictors after which kvpress can restore
KVPRESS = """\
## In kvpress 0.5.5

The files are those that kvpress's `RestoreKVPress` reads. By itself it looks in one place only, the hub repository
`higokri/RestoreKV-<last part of the model's name>` (with `_plus` for KVzip+), and takes no other name; so give it the
adapter by hand. kvpress needs transformers older than 5.3.

```python
from huggingface_hub import snapshot_download
from kvpress import RestoreKVPress
from safetensors.torch import load_file

folder = snapshot_download({name})  # or a folder
press = RestoreKVPress(compression_ratio={dropped:g}, kvzip_plus_normalization={plus})
embeddings = load_file(folder + "/restore_embeddings.safetensors")["restore_embeddings"]
press.restore_embeddings = embeddings.to(model.device, model.dtype)
press.restore_model_name = "higokri/RestoreKV-" + model.config.name_or_path.split("/")[-1] + "{suffix}"
model.load_adapter(folder, adapter_name=press.adapter_name)
model.disable_adapters()
```

Then use `press` as any other; its `compression_ratio` is 1 - r. What differs from here:

"""
NO_LORA = """\
## In kvpress 0.5.5

It cannot be used there: this adapter has no LoRA, and kvpress switches one on and off.
"""


def here(card: Card, name: str) -> str:
    """Python and shell, with the conventions that are not restorekv's defaults."""
    arguments: dict[str, object] = {"evictor": card.evictor or "kvzip", "ratio": ratio(card), "adapter": name}
    usual = {"prefix_policy": "free", "allocation": "global", "restore_from": "full"}
    arguments |= {key: getattr(card, key) for key in usual if getattr(card, key) not in (None, usual[key])}
    keywords = "".join(f"    {key}={json.dumps(value)},\n" for key, value in arguments.items())
    flags = " ".join(f"--{key.replace('_', '-')} {shlex.quote(str(value))}" for key, value in arguments.items())
    model = shlex.quote(card.model)
    return (
        "## Use\n\n"
        + ("The base model was loaded from a folder; give the place where you have it.\n\n" if card.local else "")
        + ("" if card.evictor else "The evictor is not recorded; kvzip stands here for an example.\n\n")
        + "```python\nfrom restorekv import compress, load_model\n\n"
        + f"model, tokenizer = load_model({json.dumps(card.model)})\n"
        + f'text = open("doc.txt").read()\nsmall = compress(\n    model,\n    tokenizer,\n    text,\n{keywords})\n'
        + 'print(small.ask("What is it about?"))\n```\n\n'
        + f"```sh\nrestorekv compress doc.txt -o doc.rkv --model {model} {flags}\n"
        + f'restorekv ask doc.rkv "What is it about?" --model {model}\n```\n'
    )


def ratio(card: Card) -> float:
    """0.1, or what is next to it among the ratios of the training."""
    low, high = card.ratio_range or (0.1, 0.1)
    return min(max(0.1, low), high)


def in_kvpress(card: Card, config: LoraConfig, name: str) -> str:
    """What works there and what does not (kvpress 0.5.5, presses/restorekv_press.py and kvzip_press.py)."""
    if not config.target_modules:
        return NO_LORA
    evictor, _, settings = (card.evictor or "").partition(":")
    plus = evictor == "kvzip+"
    differs = {
        "Which evictor this adapter belongs to is not recorded; kvpress restores after KVzip and KVzip+ only.":
            not evictor,
        f"kvpress restores after KVzip and KVzip+ only; this adapter was trained with {card.evictor}, so expect worse "
        "answers.": evictor and evictor not in KVPRESS_SUFFIXES,
        f"The evictor has its own settings there, not those of {card.evictor}.": settings,
        "The chat prefix counts in the budget there: its first four tokens stay, the others are the first to go.":
            card.prefix_policy != "counted",
        f"Pairs compete over the whole model there, or in each layer; here: {card.allocation}.":
            card.allocation != "global",
        "The restore pass always reads the full cache there.": card.restore_from != "full",
        "Where the budget is smaller than the restore tokens, it is exceeded there and refused here.": True,
        "Embeddings and LoRA may have the model's precision there; here they are float32.": True,
        "Evicted pairs are hidden there and stay in memory.": True,
    }  # fmt: skip
    suffix = KVPRESS_SUFFIXES.get(evictor, "")
    head = KVPRESS.format(name=json.dumps(name), plus=plus, suffix=suffix, dropped=1 - ratio(card))
    return head + "".join(f"- {what}\n" for what, holds in differs.items() if holds)
