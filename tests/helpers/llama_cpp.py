"""llama.cpp as an oracle, called through the C functions in the package xllamacpp, which contains
it.

llama.cpp's parameters are structures with fields that change between versions. Here they are blocks
of bytes that llama.cpp fills with its defaults; only the first fields of a context's parameters are
set.
"""

import ctypes
from importlib.util import find_spec
from pathlib import Path

import numpy as np

TEXT_TOKENS = 8  # more than a text of no characters has
CONTEXT_FIELDS = {"n_ctx": 0, "n_batch": 1, "n_ubatch": 2, "n_threads": 7, "n_threads_batch": 8}


class _Parameters(ctypes.Structure):
    """A block larger than any of llama.cpp's structures of parameters, which fill its beginning."""

    _fields_ = [("numbers", ctypes.c_uint32 * 256)]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_int32),
        ("tokens", ctypes.POINTER(ctypes.c_int32)),
        ("embeddings", ctypes.c_void_p),
        ("positions", ctypes.POINTER(ctypes.c_int32)),
        ("sequence_counts", ctypes.POINTER(ctypes.c_int32)),
        ("sequences", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("outputs", ctypes.POINTER(ctypes.c_int8)),
    ]


def find_library() -> Path | None:
    """Return xllamacpp's library, which contains llama.cpp, or None if it is not installed."""
    spec = find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("xllamacpp*.so"), None)


class LlamaCpp:
    """A GGUF file, loaded by llama.cpp."""

    def __init__(self, library: Path, file: Path) -> None:
        self.library = own = ctypes.CDLL(str(library))
        own.llama_model_default_params.restype = _Parameters
        own.llama_context_default_params.restype = _Parameters
        for name in ("llama_model_load_from_file", "llama_model_get_vocab", "llama_get_memory"):
            getattr(own, name).restype = ctypes.c_void_p
        own.llama_init_from_model.restype = ctypes.c_void_p
        own.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
        own.llama_batch_init.restype = _Batch
        # It prints a page about each model.
        log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        self._silent = log(lambda level, text, data: None)
        own.llama_log_set(self._silent, None)
        own.llama_backend_init()
        self.model = ctypes.c_void_p(
            own.llama_model_load_from_file(str(file).encode(), own.llama_model_default_params())
        )
        self.vocabulary = ctypes.c_void_p(own.llama_model_get_vocab(self.model))
        self.words = own.llama_vocab_n_tokens(self.vocabulary)

    def tokenize(self, text: str, special: bool) -> list[int]:
        """Return the ids of a text without BOS; `special` says whether it may spell
        control tokens.
        """
        raw = text.encode()
        room = (ctypes.c_int32 * (len(raw) + TEXT_TOKENS))()
        count = self.library.llama_tokenize(
            self.vocabulary, raw, len(raw), room, len(room), False, special
        )
        assert count >= 0
        return list(room[:count])

    def compute_logits(self, ids: list[int]) -> np.ndarray:
        """Return the logits (T, V) after each of the ids (T,), computed in one pass."""
        own = self.library
        parameters = own.llama_context_default_params()
        wanted = {"n_ctx": len(ids), "n_batch": len(ids), "n_ubatch": 512}
        for name, value in {**wanted, "n_threads": 1, "n_threads_batch": 1}.items():
            parameters.numbers[CONTEXT_FIELDS[name]] = value
        context = ctypes.c_void_p(own.llama_init_from_model(self.model, parameters))
        batch = own.llama_batch_init(len(ids), 0, 1)
        batch.count = len(ids)
        for place, token in enumerate(ids):
            batch.tokens[place] = token
            batch.positions[place] = place
            batch.sequence_counts[place] = 1
            batch.sequences[place][0] = 0
            batch.outputs[place] = 1
        assert own.llama_decode(context, batch) == 0
        rows = []
        for place in range(len(ids)):
            row = own.llama_get_logits_ith(context, place)
            rows.append(np.ctypeslib.as_array(row, (self.words,)).copy())
        own.llama_batch_free(batch)
        own.llama_free(context)
        return np.stack(rows)


def dequantize_file(file: Path, target: Path) -> Path:
    """Write a GGUF file with the same weights in float32, for which llama.cpp does not round
    activations to 8 bits.
    """
    import gguf

    reader = gguf.GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values, raw_dtype=gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
