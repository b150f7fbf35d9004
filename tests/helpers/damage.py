"""Cache files that are damaged on purpose, sealed again, and have to be refused."""

import json

import pytest

from restorekv import CompressedContext
from restorekv.errors import CacheFileError
from restorekv.seal import read_sealed, write_sealed
from restorekv.storage.cache_file import KIND


def change(name, make):
    """Return a function that changes one tensor of a file."""

    def apply(tensors, manifest):
        tensors[name] = make(tensors[name])

    return apply


def record(**fields):
    """Return a function that changes fields of a file's manifest."""

    def apply(tensors, manifest):
        manifest.update(fields)

    return apply


def check_refused(small, damage, path):
    """Check that a file of a context is refused once `damage` has changed tensors and manifest."""
    small.save(path)
    metadata, tensors = read_sealed(path, KIND)
    manifest = json.loads(metadata["manifest"])
    damage(tensors, manifest)
    write_sealed(path, KIND, tensors, {"manifest": json.dumps(manifest)})
    with pytest.raises(CacheFileError):
        CompressedContext.load(path, small.model, small.tokenizer)
