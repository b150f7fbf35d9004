"""Documents that make rows of a table."""

from restorekv.tiny.world import Document, Question

TEXT = (
    "the code of the red house is seven; who lives in the blue house? the blue house is the code of who. "
    * 2
)
QUESTIONS = (
    Question("who?", ("red",), "red", "qa", "all", 3),
    Question("what?", ("is",), "is", "vt", "all", 3),
)
DOCUMENTS = [Document(TEXT + tail, "made", QUESTIONS) for tail in ("red", "blue house")]
