"""SCBench: small parquet files in the true format, and every metric by hand and against its
definition written anew.
"""

import math
import random
from collections import Counter
from fractions import Fraction

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from restorekv.errors import RestoreKVError
from restorekv.tasks import make_benchmark, scbench
from restorekv.tasks.metrics import contains_text, write_digits
from restorekv.tasks.scbench import METRICS, TASKS, get_full_task, score_option

ADD = "def add(a, b):\n    total = a + b\n    print('sum', total)\n    return total"
MUL = "def mul(a, b):\n    return a * b"
CHOICES = "Which one?\nOptions:\n(A) the red one\n(B) law (of men)\nAnswer:"
ROWS = {
    "kv": ["Key k?", "value-1"],
    "prefix_suffix": ["Starts with a?", "a-word-b"],
    "vt": ["Which variables?", ["VAR1", "VAR2", "VAR3"]],
    "qa_eng": ["Who?", "the two sisters"],
    "choice_eng": ["Which?", "A red boat"],
    "mf": ["Largest?", 42],
    "many_shot": [CHOICES, "B"],
    "summary": ["Summarise.", "the cat sat on a mat"],
}


@pytest.fixture
def folder(tmp_path):
    """Every task: two contexts of two questions each."""
    for task, (asked, truth) in ROWS.items():
        row = {"prompts": [f"Context of {task}.", asked, asked], "ground_truth": [truth, truth]}
        parquet.write_table(
            arrow.Table.from_pylist([row, row]), tmp_path / f"scbench_{task}.parquet"
        )
    code = {
        "prompts": ["Code.", "Adds.", "Multiplies."],
        "ground_truth": [ADD, MUL],
        "func_name": ["add", "mul"],
    }
    code |= {"lang": "python", "repo": "some/where"}
    parquet.write_table(arrow.Table.from_pylist([code, code]), tmp_path / "scbench_repoqa.parquet")
    return tmp_path


def asked(folder, task, protocol="kvzip"):
    benchmark = make_benchmark(f"scbench:path={folder},tasks={task}")
    return benchmark, benchmark.choose_samples(None, protocol)[0].questions[0]


def test_all_nine_tasks_are_read_in_order(folder):
    made = make_benchmark(f"scbench:path={folder}").choose_samples(None, "kvzip")
    assert [sample.id for sample in made] == [
        f"{task}-{index}" for task in TASKS for index in (0, 1)
    ]
    assert all(
        len(sample.questions) == 2 and sample.questions[0].task == sample.id[:-2] for sample in made
    )
    assert len({question.id for sample in made for question in sample.questions}) == 36
    assert made[0].context == "Context of kv." and made[0].questions[0].text == "Key k?"
    answers = {sample.questions[0].task: sample.questions[0].answers for sample in made}
    assert answers["vt"] == ("VAR1, VAR2, VAR3",) and answers["mf"] == ("42",)
    assert answers["many_shot"] == ("(B) law (of men)",)


def test_counts_are_spread_over_tasks(folder):
    made = make_benchmark(f"scbench:path={folder},count=9").choose_samples(None, "kvzip")
    assert [sample.questions[0].task for sample in made] == list(TASKS)


def test_lengths_are_the_protocols(folder):
    lengths = {
        protocol: {
            sample.questions[0].task: sample.questions[0].max_new_tokens
            for sample in make_benchmark(f"scbench:path={folder}").choose_samples(None, protocol)
        }
        for protocol in ("kvzip", "kvpress")
    }
    assert lengths["kvzip"] == dict.fromkeys(TASKS, 96) | {"mf": 32, "summary": 256, "repoqa": 512}
    assert lengths["kvpress"] == {
        "kv": 150,
        "prefix_suffix": 150,
        "vt": 30,
        "repoqa": 1024,
        "qa_eng": 40,
        "choice_eng": 40,
        "mf": 5,
        "many_shot": 10,
        "summary": 200,
    }
    assert asked(folder, "kv", "kvpress")[1].text == "\n\nKey k?"
    benchmark = make_benchmark("scbench")
    assert benchmark.averages_contexts("kvzip") and not benchmark.averages_contexts("kvpress")


def test_shorter_variants_are_tasks_of_their_own(folder):
    (folder / "scbench_kv.parquet").rename(folder / "scbench_kv_short.parquet")
    benchmark, question = asked(folder, "kv_short")
    assert (
        question.task == "kv_short" and benchmark.score(question, "It is VALUE 1 or value1.") == 1
    )
    assert [get_full_task(task) for task in ("kv_tiny", "qa_eng", "prefix_suffix_mid")] == [
        "kv",
        "qa_eng",
        "prefix_suffix",
    ]
    for task in ("kv_long", "vt_tiny", "passkey", ""):
        with pytest.raises(RestoreKVError, match="SCBench has no task"):
            make_benchmark(f"scbench:tasks={task or '+'}")


SCORES = [
    ("kv", "VALUE-1!", 1),
    ("kv", "value 1", 0),
    ("kv", "", 0),
    ("kv", " </s>", 0),
    ("prefix_suffix", "it is awordb, surely", 1),
    ("vt", "VAR1 and VAR3", 2 / 3),
    ("vt", "var1", 0),
    ("vt", "VAR12", 1 / 3),
    ("qa_eng", "2 sisters", 1),
    ("qa_eng", "the sisters", 2 / 3),
    ("qa_eng", "they were two sisters of his", 1),
    ("qa_eng", "nobody", 0),
    ("choice_eng", "It is a RED boat.\nBecause", 1),
    ("choice_eng", "Because\nIt is a red boat", 0),
    ("mf", "42", 1),
    ("mf", "42</s>", 1),
    ("mf", " 42", 0),
    ("mf", "42.", 0),
    ("many_shot", "(B) anything", 1),
    ("many_shot", "It is (B).", 1),
    ("many_shot", "(A) the red one", 0),
    ("many_shot", "I say: The Law of men!", 1),
    ("many_shot", "I say: law", 0),
    ("many_shot", "B", 0),
    ("summary", "the cat sat on a mat", 1),
    ("summary", "the cat", 2 * 1 / 3 / (1 + 1 / 3)),
    ("summary", "...", 0),
    ("repoqa", ADD, 1),
    ("repoqa", f"Here it is:\n\n```python\nimport os\n\n{ADD}\n\nadd(1, 2)\n```\nDone.", 1),
    ("repoqa", f"```\n{MUL}\n```", 0),
    ("repoqa", "def add(a, b): pass", 0),
    ("repoqa", "", 0),
]


@pytest.mark.parametrize(("task", "said", "score"), SCORES)
def test_scores_by_hand(folder, task, said, score):
    benchmark, question = asked(folder, task)
    assert benchmark.score(question, said) == pytest.approx(score, abs=1e-6)


def test_digit_words_are_digits():
    assert write_digits("  Nine, a ONE-two (three) threes; the zero ") == "9 onetwo 3 threes 0"
    assert contains_text("It took 7 of them.", "Seven") == 1


def test_options_compare_letters_or_texts():
    assert score_option("f(x) is (B)", "(x) y") == 1
    assert score_option("(B) law", "(B) law") == 1
    assert score_option("law", "answer: (B) law") == 0
    assert score_option("the law of men", "(B) law (of men)") == 1


# The definitions again, by other ways than the code's, on generated pairs.

WORDS = "the a an one two red blue cat sat mat is of on at it Nine 9 zero house".split()
RARE = "gate hill lamp rope".split() * 5
PUNCTUATION = ["", "", "", ".", ",", "!", " -", ";"]


def texts(seed, count=250):
    """Pairs of a prediction and a reference that share words often."""
    rng = random.Random(seed)
    for _ in range(count):
        reference = [rng.choice([*WORDS, *RARE]) for _ in range(rng.randint(1, 4))]
        said = [rng.choice(WORDS) for _ in range(rng.randint(0, 5))]
        said = said + reference + said[:1] if rng.random() < 0.4 else said + reference[1:]
        style = rng.choice([str.lower, str.upper, str.title, str])
        yield (
            "".join(style(word) + rng.choice(PUNCTUATION) + " " for word in said).strip(),
            " ".join(reference),
        )


def plain(text):
    """Words one by one: lower case, letters and digits alone, articles left out, digit words as
    digits.
    """
    digits = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    words = ["".join(filter(str.isalnum, word)) for word in text.lower().split()]
    return [
        str(digits.index(word)) if word in digits else word
        for word in words
        if word not in ("", "a", "an", "the")
    ]


def overlap(said, wanted):
    left, common = list(wanted), 0
    for word in said:
        if word in left:
            left.remove(word)
            common += 1
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def found(said, wanted):
    return any(
        " ".join(said)[place:].startswith(" ".join(wanted))
        for place in range(len(" ".join(said)) + 1)
    )


def expected_by_words(task, said, reference):
    if not said.strip():
        return 0.0
    if task == "choice_eng":
        said = said.partition("\n")[0]
    inside = float(found(plain(said), plain(reference)))
    return max(overlap(plain(said), plain(reference)), inside) if task == "qa_eng" else inside


@pytest.mark.parametrize("task", ["kv", "prefix_suffix", "qa_eng", "choice_eng"])
def test_word_metrics_equal_their_definition(folder, task):
    benchmark, question = asked(folder, task)
    scores = []
    for number, (said, reference) in enumerate(texts(task)):
        said = said.replace(" ", "\n", 1) if number % 3 == 0 else said
        known = type(question)("", task, "", (reference,), 1)
        scores.append(benchmark.score(known, said))
        assert scores[-1] == pytest.approx(expected_by_words(task, said, reference), abs=1e-12), (
            said,
            reference,
        )
    assert len(scores) >= 200 and 0 in scores and 1 in scores


def test_vt_and_mf_equal_their_definition():
    rng = random.Random(2)
    names = [a + b for a in "XYZ" for b in "123"]
    shares = set()
    for _ in range(250):
        wanted = rng.sample(names, rng.randint(1, 4))
        said = " ".join(rng.sample(names, rng.randint(0, 5)))
        hits = [place for place in wanted if len(said.split(place)) > 1]
        shares.add(score := METRICS["vt"](said, ", ".join(wanted)))
        assert score == pytest.approx(len(hits) / len(wanted))
        number, other = str(rng.randint(0, 3)), rng.choice(["0", "1", "2", " 3", "3."])
        same = len(number) == len(other) and all(
            x == y for x, y in zip(number, other, strict=False)
        )
        assert METRICS["mf"](other, number) == same
    assert len(shares) > 4


def test_many_shot_equals_its_definition():
    rng = random.Random(3)
    options = {"A": "red cat", "B": "blue house", "C": "nine mats", "D": "cat"}
    scores = []
    for _ in range(250):
        letter = rng.choice("ABCD")
        pieces = ["(", rng.choice("ABCD"), ")", " ", options[rng.choice("ABCD")], " ", "is it", "."]
        said = "".join(piece for piece in pieces if rng.random() < 0.8)
        inside = said[said.find("(") + 1 :] if "(" in said else None
        if inside is None:
            right = found(plain(said), plain(options[letter]))
        else:
            right = inside.partition(")")[0].partition("(")[0] == letter
        scores.append(METRICS["many_shot"](said, f"({letter}) {options[letter]}"))
        assert scores[-1] == right, said
    assert {0, 1} == set(scores)


def test_rouge_l_equals_its_definition_on_single_sentences():
    """Of distinct words, in one sentence: the F of the longest common subsequence."""
    rng = random.Random(4)
    words = "red blue cat dog sat ran mat hat one two six sun".split()
    for _ in range(250):
        said, wanted = (rng.sample(words, rng.randint(1, 10)) for _ in range(2))
        rows = [[0] * (len(wanted) + 1)]
        for word in said:
            row = [0]
            for place, other in enumerate(wanted):
                row.append(
                    rows[-1][place] + 1 if word == other else max(row[-1], rows[-1][place + 1])
                )
            rows.append(row)
        longest = rows[-1][-1]
        score = METRICS["summary"](" ".join(said), " ".join(wanted))
        assert score == pytest.approx(2 * longest / (len(said) + len(wanted)), abs=1e-6)


def bleu(said, wanted):
    """Papineni's definition with Chen and Cherry's method 4: the i-th zero precision becomes ln(l)
    / (5 2^i) counts.
    """
    logs, zeros = 0.0, 0
    for n in range(1, 5):
        grams, other = (
            Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1))
            for text in (said, wanted)
        )
        hits = sum(min(times, other[gram]) for gram, times in grams.items())
        if not hits and n == 1:
            return 0.0
        most = max(len(said) - n + 1, 1)
        if hits:
            logs += math.log(Fraction(hits, most)) / 4
        elif len(said) > 1:
            zeros += 1
            logs += math.log(math.log(len(said)) / (5 * 2**zeros) / most) / 4
    return math.exp(logs + min(0, 1 - len(wanted) / len(said)))


def test_similarity_is_bleu():
    rng = random.Random(6)
    tokens = "def f ( x ) : return x + 1 if else for in range print".split()
    for _ in range(250):
        wanted = [rng.choice(tokens) for _ in range(rng.randint(1, 12))]
        said = [word if rng.random() < 0.8 else rng.choice(tokens) for word in wanted][
            : rng.randint(1, 12)
        ]
        assert scbench.compare_words(" \n".join(said), "  ".join(wanted)) == pytest.approx(
            bleu(said, wanted), abs=1e-12
        )


def test_repoqa_asks_for_the_most_similar_function_above_the_threshold():
    rng = random.Random(7)
    tokens = [f"t{number}" for number in range(30)]
    passed = 0
    for _ in range(220):
        functions = [(name, " ".join(rng.choice(tokens) for _ in range(20))) for name in "fgh"]
        words = rng.choice(functions)[1].split()
        said = [word if rng.random() < 0.97 else "other" for word in words]
        likeness = {name: bleu(said, source.split()) for name, source in functions}
        right = max(likeness, key=likeness.get) == "f" and likeness["f"] >= 0.8
        assert (
            scbench.passes_repoqa("```\n" + " ".join(said) + "\n```", "python", "f", functions)
            == right
        )
        passed += right
    assert 20 < passed < 200


CODE = {
    "python": (
        "class A:\n    @cache\n    def f(self):\n        return 1\n\ndef g(): pass",
        "def f(self):\n        return 1",
    ),
    "java": ("class A {\n  A() {}\n  int f(int x) { return x; }\n}", "int f(int x) { return x; }"),
    "typescript": (
        "const a = () => 1;\nexport function f(x: number) { return x; }",
        "function f(x: number) { return x; }",
    ),
    "rust": ("struct S;\nimpl S { pub fn f(&self) -> u8 { 1 } }", "pub fn f(&self) -> u8 { 1 }"),
    "cpp": (
        "int A::m() { return 1; }\nint *p() { return 0; }\nint f(int x) { return x; }",
        "int f(int x) { return x; }",
    ),
    "go": (
        "package a\nfunc (s S) m() {}\nfunc f(x int) int { return x }",
        "func f(x int) int { return x }",
    ),
}


@pytest.mark.parametrize("language", CODE)
def test_functions_are_taken_out_of_blocks(language):
    source, function = CODE[language]
    assert scbench.extract_function(f"Sure:\n```{language}\n{source}\n```\n", language) == function
    assert scbench.extract_function(source, language) == source, (
        "nothing is taken out of what is in no block"
    )
    assert scbench.extract_function(f"```\nx\n```\n\n```\n{source}\n```", language) == function
    assert scbench.extract_function("```\n? ?\n```\n```\ny\n```", language) == "? ?\n"
    assert scbench.extract_function("```\nopen", language) == "```\nopen"


def spoilt(folder, task, **columns):
    path = folder / f"scbench_{task}.parquet"
    row = parquet.read_table(path).to_pylist()[0] | columns
    parquet.write_table(arrow.Table.from_pylist([row]), path)


@pytest.mark.parametrize(
    ("task", "columns", "told"),
    [
        ("kv", {"prompts": ["context", "one"]}, "a prompt for every ground_truth"),
        ("kv", {"prompts": "text"}, "a prompt for every ground_truth"),
        ("kv", {"prompts": [1, 2, 3]}, "a prompt for every ground_truth"),
        ("kv", {"ground_truth": []}, "a prompt for every ground_truth"),
        ("many_shot", {"ground_truth": ["A", "E"]}, r"option \(E\)"),
        ("repoqa", {"func_name": ["add"]}, "lacks lang or a func_name"),
        ("repoqa", {"lang": None}, "lacks lang or a func_name"),
        ("repoqa", {"lang": "cobol"}, "Functions of cobol"),
    ],
)
def test_malformed_rows_are_told(folder, task, columns, told):
    spoilt(folder, task, **columns)
    with pytest.raises(RestoreKVError, match=told):
        asked(folder, task)


def test_missing_and_damaged_files_are_told(folder, monkeypatch):
    (folder / "scbench_kv.parquet").unlink()
    with pytest.raises(
        RestoreKVError,
        match=r"no file scbench_kv.parquet; fetch it from Jang-Hyun/SCBench-preprocessed",
    ):
        asked(folder, "kv")
    (folder / "scbench_mf.parquet").write_text("no parquet")
    with pytest.raises(RestoreKVError, match="damaged or not a parquet"):
        asked(folder, "mf")


def test_the_hub_is_asked_for_the_tasks_file(folder, monkeypatch):
    fetched = []

    def download(repository, file, repo_type, revision):
        fetched.append((repository, file, repo_type, revision))
        return str(folder / file)

    monkeypatch.setattr("restorekv.tasks.scbench.hf_hub_download", download)
    assert len(make_benchmark("scbench:tasks=kv,revision=abc").choose_samples(None, "kvzip")) == 2
    assert fetched == [("Jang-Hyun/SCBench-preprocessed", "scbench_kv.parquet", "dataset", "abc")]

    def offline(*_, **__):
        raise OSError("no network\nlong story")

    monkeypatch.setattr("restorekv.tasks.scbench.hf_hub_download", offline)
    with pytest.raises(
        RestoreKVError,
        match=r"Cannot read scbench_kv.parquet .*\(no network\); fetch it .*path=FOLDER",
    ):
        make_benchmark("scbench:tasks=kv").choose_samples(None, "kvzip")


def test_a_task_that_is_named_twice_is_refused():
    """Its questions would count twice, under the same ids."""
    with pytest.raises(RestoreKVError, match="is given kv twice; name each task once"):
        make_benchmark("scbench:tasks=kv+mf+kv")
