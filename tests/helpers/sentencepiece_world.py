"""SentencePiece's own library with the vocabulary that a GGUF file describes."""

from collections.abc import Mapping
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

SPACE = "\u2581"
USER_DEFINED = 4
BPE = 2


def build_processor(fields: Mapping[str, Any]) -> sentencepiece.SentencePieceProcessor:
    """Return a processor that adds no tokens and does not change the text.

    GGUF files and SentencePiece use the same numbers for the kinds of tokens, but a file writes the
    spaces of user-defined tokens as plain spaces.
    """
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    model = sentencepiece_model_pb2.ModelProto()
    rows = zip(own["tokens"], own["scores"], own["token_type"], strict=True)
    for number, (token, score, kind) in enumerate(rows):
        piece = model.pieces.add()
        piece.piece = token.replace(" ", SPACE) if kind == USER_DEFINED else token
        piece.score = score
        # Files of Gemma count the unknown token among the control tokens.
        piece.type = 2 if number == own["unknown_token_id"] else kind
    model.trainer_spec.model_type = BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.vocab_size = len(own["tokens"])
    for name, field in (("unk", "unknown"), ("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        setattr(model.trainer_spec, f"{name}_id", own.get(f"{field}_token_id", -1))
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = own.get("add_space_prefix", True)
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.escape_whitespaces = True
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
