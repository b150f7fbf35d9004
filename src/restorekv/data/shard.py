"""One source's examples as a parquet file: a row per question, a repeated context stored once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from restorekv.data.files import optional
from restorekv.errors import RestoreKVError
from restorekv.files import replacing

TEXTS = ("source", "document", "context", "kind", "question", "answer", "licence")
NUMBERS = ("context_tokens", "question_tokens", "answer_tokens")
COLUMNS = (*TEXTS, *NUMBERS, "answer_ids")
PAGE = 256 * 2**20


def write_shard(path: Path, rows: list[dict]) -> None:
    """Whole or not at all; the same rows give the same bytes."""
    arrow, parquet = optional("pyarrow"), optional("pyarrow.parquet")
    kinds = {**dict.fromkeys(TEXTS, arrow.string()), **dict.fromkeys(NUMBERS, arrow.int32())}
    schema = arrow.schema({**kinds, "answer_ids": arrow.list_(arrow.int32())})
    table = arrow.Table.from_pylist(rows, schema=schema)
    with replacing(path) as temporary:
        parquet.write_table(
            table, temporary, compression="zstd", use_dictionary=list(TEXTS), dictionary_pagesize_limit=PAGE
        )


def parquet_rows(path: Path, columns: tuple[str, ...] | None = None) -> Iterator[dict]:
    """Rows as plain values; refuses a file that is damaged or lacks one of `columns`."""
    parquet, arrow = optional("pyarrow.parquet"), optional("pyarrow")
    try:
        file = parquet.ParquetFile(path)
        missing = [name for name in columns or () if name not in file.schema_arrow.names]
        if missing:
            raise RestoreKVError(f"{path} lacks the column {missing[0]}; build the data again.")
        for batch in file.iter_batches(256, columns=list(columns) if columns else None):
            yield from batch.to_pylist()
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0].split(". ")[0].rstrip(".")
        raise RestoreKVError(f"{path} is damaged or no parquet file ({reason}); get or build it again.") from error
