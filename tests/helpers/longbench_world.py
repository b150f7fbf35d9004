"""Small rows of LongBench in the official format, for LongBench and QASPER."""

TYPES = ["Colour", "Colour of a thing", "Place"]
OFFICIAL = {
    "qasper": [
        ("How many lamps?", "Lamps\nWe lit {nine} lamps.", ["nine", "9 lamps"], None),
        ("Who paid?", "Costs\nNobody paid.", ["Unanswerable"], None),
        ("Were they lit?", "Lamps\nWe lit {nine} lamps.", ["Yes"], None),
    ],
    "trec": [
        (
            "Question: Where is the mill?\nType:",
            "Question: Where is it?\nType: Place",
            ["Place"],
            TYPES,
        )
    ],
    "lcc": [("", "def f():\n    x = 1\n", ["    return x"], None)],
    "passage_retrieval_en": [
        ("Of mills.", "Paragraph 1: A mill.\n\nParagraph 2: A lamp.", ["Paragraph 1"], None)
    ],
}


def official_rows(task):
    """Return the rows of one task's file."""
    return [
        {
            "input": asked,
            "context": context,
            "answers": answers,
            "length": len(context.split()),
            "dataset": task,
            "language": "en",
            "all_classes": classes,
            "_id": f"{number:048x}",
        }
        for number, (asked, context, answers, classes) in enumerate(OFFICIAL[task])
    ]
