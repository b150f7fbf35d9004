"""Two documents with questions, as in the tiny suite."""

from restorekv.tiny.world import WorldDocument, WorldQuestion

TEXT = (
    "the code of the red house is seven; who lives in the blue house? the blue house is the code "
    "of who. " * 2
)
QUESTIONS = (
    WorldQuestion("who?", ("red",), "red", "qa", "all", 3),
    WorldQuestion("what?", ("is",), "is", "vt", "all", 3),
)
DOCUMENTS = [WorldDocument(TEXT + tail, "made", QUESTIONS) for tail in ("red", "blue house")]
