"""A count of the bytes of all tensors that are alive at the same time, storage by storage. It is
exact, and the same on every machine.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Held(TorchDispatchMode):
    """A mode that measures the peak bytes of tensors in its block.

    `most` is the most that storages made in the block, and those of the tensors `of`, held at the
    same time.
    """

    def __init__(self, *of: torch.Tensor) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.most = 0
        for tensor in of:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place and place not in self.sizes:
            self.sizes[place] = storage.nbytes()
            weakref.finalize(storage, self.sizes.pop, place, None)
            self.most = max(self.most, sum(self.sizes.values()))

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor):
                self.add(each)
        return result
