"""Wall time of phases and tokens. It does not import restorekv, so kvpress's side can use
it too.
"""

import contextlib
import time
from collections.abc import Iterator
from statistics import median


class TokenTimer:
    """A clock for generated tokens, to be called after each of them.

    The first interval includes the question, each later one is that of a single token.
    """

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, *_: object) -> None:
        self.times.append(time.perf_counter())

    def figures(self) -> dict[str, float]:
        """Return the seconds to the first token (`question`) and those of later tokens: median
        (`token`), `least` and `most`. The second token is skipped as a warm-up.
        """
        gaps = [late - early for early, late in zip(self.times, self.times[1:], strict=False)]
        return {
            "question": gaps[0],
            "token": median(gaps[2:]),
            "least": min(gaps[2:]),
            "most": max(gaps[2:]),
        }


@contextlib.contextmanager
def time_block(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Write the block's wall time to `seconds[phase]`."""
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start
