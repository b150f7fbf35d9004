"""Lists the benchmarks by name. A spec is a name with settings: "ruler:length=8192",
"tiny:count=104".
"""

from restorekv import spec
from restorekv.tasks.base import Benchmark, Question, Sample
from restorekv.tasks.factbook import Factbook
from restorekv.tasks.fairytaleqa import FairytaleQA
from restorekv.tasks.genres import Genres
from restorekv.tasks.lettered import LongHealth, Quality
from restorekv.tasks.lines import Lines
from restorekv.tasks.longbench import LongBench
from restorekv.tasks.needle import Needle
from restorekv.tasks.qasper import Qasper
from restorekv.tasks.ruler.benchmark import Ruler
from restorekv.tasks.scbench import SCBench
from restorekv.tasks.squad import HotpotQA, XQuAD
from restorekv.tasks.tiny import TinySuite

__all__ = ["BENCHMARKS", "Benchmark", "Question", "Sample", "make_benchmark"]

KINDS = (
    TinySuite,
    Factbook,
    FairytaleQA,
    Genres,
    HotpotQA,
    Lines,
    LongBench,
    LongHealth,
    Needle,
    Qasper,
    Quality,
    Ruler,
    SCBench,
    XQuAD,
)
BENCHMARKS: dict[str, type[Benchmark]] = {kind.name: kind for kind in KINDS}
spec.register_entry_points("restorekv.benchmarks", BENCHMARKS)


def make_benchmark(text: str) -> Benchmark:
    """Make a benchmark from its spec: "ruler:length=1024,per_task=5".

    A program must add its own benchmarks to BENCHMARKS first, even to read stored results of them.
    """
    return spec.parse_spec(text, BENCHMARKS, "benchmark", bases=(Benchmark,))
