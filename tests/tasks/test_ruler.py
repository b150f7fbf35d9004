"""RULER's generated samples, each checked by reading its text again, and the metric on cases worked
out by hand.
"""

import gzip
import random
import re
from collections import Counter

import pytest
from transformers import AutoTokenizer

from restorekv.errors import RestoreKVError
from restorekv.tasks import Question, make_benchmark
from restorekv.tasks.base import digest_samples
from restorekv.tasks.reading import TEXTS
from restorekv.tasks.ruler.benchmark import ESSAY_TASKS, REPLACEMENTS, TASKS
from restorekv.tasks.ruler.documents import DocumentQuestion, ask_over_documents
from restorekv.tasks.ruler.draft import find_most_units
from restorekv.tasks.ruler.needles import Essays, hide_needles
from restorekv.tasks.ruler.synthetic import find_frequent_words
from tests.helpers.processes import TINY, digest_elsewhere

DOCUMENT = {"generated": 200, "novel": 700}  # tokens of the longest document
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
LIMITS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
# Where kvpress cuts a RULER prompt: the question at the last match, the answer prefix at the first
# one after it.
QUESTIONS = {
    "niah": r"What (?:is|are all) the special magic",
    "vt": r"Question: Find all variables that are assigned the value",
    "cwe": r"Question: What are the 10 most common words in the above list\?",
    "fwe": r"Question: Do not provide any explanation\.",
    "qa": r"Answer the question based on the given documents\.",
}
PREFIXES = {
    "niah": "The special magic",
    "vt": "Answer:",
    "cwe": "Answer:",
    "fwe": "Answer:",
    "qa": "Answer:",
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def made(tokenizer):
    """Four samples of every task at 2,048 tokens of the tiny tokenizer."""
    every = list(
        make_benchmark("ruler:source=generated,length=2048,per_task=4,seed=3").load_samples(
            tokenizer, "kvpress"
        )
    )
    return {
        task: [sample for sample in every if sample.questions[0].task == task] for task in TASKS
    }


def whole(sample):
    (asked,) = sample.questions
    return sample.context + asked.text + asked.answer_prefix


def tokens(tokenizer, text):
    return len(tokenizer(text, add_special_tokens=False).input_ids)


def test_a_perfect_answer_scores_one_and_a_partial_one_its_share():
    ruler = make_benchmark("ruler")
    both = Question("0", "niah_multivalue", "", ("1234567", "7654321"), 128)
    assert ruler.score(both, " 1234567 and 7654321.") == 1
    assert ruler.score(both, "1234567, 1234567") == 0.5
    assert ruler.score(both, "") == 0
    cased = Question("0", "vt", "", ("ABCDE", "FGHIJ", "KLMNO", "PQRST", "UVWXY"), 30)
    assert ruler.score(cased, "abcde fghij\nklmno") == pytest.approx(0.6)
    assert ruler.score(cased, "AB\x00CDE") == 0.2  # control characters vanish, newlines too
    assert ruler.score(cased, "AB\nCDE") == 0.2
    assert ruler.score(cased, "AB CDE") == 0


def test_of_qa_any_reference_counts():
    asked = Question("0", "qa_1", "", ("Denver Broncos", "Broncos"), 32)
    assert make_benchmark("ruler").score(asked, "the broncos") == 1
    assert make_benchmark("ruler").score(asked, "Carolina") == 0
    assert (
        make_benchmark("ruler").score(Question("0", "niah_single_1", "", ("a", "b"), 128), "a")
        == 0.5
    )


@pytest.mark.parametrize("task", TASKS)
def test_parts_are_where_kvpress_cuts(made, task):
    family = task.split("_")[0]
    for sample in made[task]:
        text, (asked,) = whole(sample), sample.questions
        start = list(re.finditer(QUESTIONS[family], text))[-1].start()
        end = start + text[start:].index(PREFIXES[family])
        assert (sample.context, asked.text, asked.answer_prefix) == (
            text[:start],
            text[start:end],
            text[end:],
        )
        assert (asked.max_new_tokens, asked.task) == (LIMITS[family], task)
        assert len({*asked.answers}) == len(asked.answers)
    assert (
        len({sample.context for sample in made[task]})
        == len({sample.id for sample in made[task]})
        == 4
    )


def needles_in(context):
    """(kind, key, value) of every needle."""
    return re.findall(r"One of the special magic (\w+) for (.+?) is: ([\w-]+)\.", context)


@pytest.mark.parametrize("task", [task for task in TASKS if task.startswith("niah")])
def test_needles_are_in_the_context_once(made, task):
    kind = "uuids" if task in ("niah_single_3", "niah_multikey_3") else "numbers"
    many = task in ("niah_multivalue", "niah_multiquery")
    for sample in made[task]:
        (asked,) = sample.questions
        found = needles_in(sample.context)
        assert {each for each, _, _ in found} == {kind}
        assert len({value for _, _, value in found}) == len(found)
        queried = (
            re.search(r"magic \w+ for (.+) mentioned", asked.text)
            .group(1)
            .replace(", and ", ", ")
            .split(", ")
        )
        assert asked.answers == tuple(
            value
            for key in queried
            for value in sorted_like(asked.answers, [v for _, k, v in found if k == key])
        )
        assert len(asked.answers) == (4 if many else 1) and len(queried) == (
            4 if task == "niah_multiquery" else 1
        )
        assert sample.context.startswith(
            f"Some special magic {kind} are" if many else f"A special magic {kind[:-1]} is"
        )
        pattern = (
            r"[1-9]\d{6}"
            if kind == "numbers"
            else r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
        )
        assert all(re.fullmatch(pattern, value) for _, _, value in found)
        keys = Counter(key for _, key, _ in found)
        distractors = len(sample.context.splitlines()) - 1 if "needle" in haystack(task) else None
        assert len(keys) == {"niah_multikey_1": 4, "niah_multiquery": 4}.get(task, distractors or 1)


def sorted_like(reference, values):
    return sorted(values, key=reference.index)


def haystack(task):
    return {"niah_single_1": "noise", "niah_multikey_2": "needle", "niah_multikey_3": "needle"}.get(
        task, "essay"
    )


def test_haystacks_are_the_official_ones(made):
    for sample in made["niah_single_1"]:
        lines = sample.context.splitlines()[1:]
        assert Counter(lines).pop(NOISE) == len(lines) - 1
    for task in ("niah_multikey_2", "niah_multikey_3"):
        assert all(needles_in(line) for line in made[task][0].context.splitlines()[1:])
    told = [
        re.sub(r" ?One of the special.+?\.", "", sample.context) for sample in made["niah_single_2"]
    ]
    assert len({text[:1500] for text in told}) == 1  # one text for all samples, as the essays are


def test_variable_chains_lead_to_the_answers(made):
    for sample in made["vt"]:
        (asked,) = sample.questions
        example, context = sample.context.split("\n\n\n\n")
        head, solved = example.split("they are: ")
        for text, letters, answers in (
            (head, 3, solved.split()),
            (context, 5, list(asked.answers)),
        ):
            value = re.search(rf"VAR [A-Z]{{{letters}}} = (\d{{5}})", text).group(1)
            chain = re.findall(rf"VAR ([A-Z]{{{letters}}}) = (?:VAR )?(\w+)", text)
            followed = [value]
            for name, source in chain:  # every link stands after the one that it needs
                assert source == followed[-1]
                followed.append(name)
            assert followed[1:] == answers and len(answers) == 5
        assert re.findall(r"value (\d+)", asked.text + asked.answer_prefix) == [value, value]
        assert asked.answer_prefix.endswith(
            f"5 variables are assigned the value {value}, they are: "
        )
        assert context.count("The grass is green.") > 10


def listed_words(text):
    found = re.findall(r"(\d+)\. (.+?)(?= \d+\. |\n|$)", text)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [word for _, word in found]


@pytest.mark.parametrize(
    ("length", "example", "main"), [(1024, (2, 1, 15), (3, 1)), (2048, (3, 1, 20), (6, 1))]
)
def test_common_words_are_recounted(tokenizer, length, example, main):
    for sample in make_benchmark(f"ruler:length={length},per_task=3,tasks=cwe").load_samples(
        tokenizer, "kvpress"
    ):
        (asked,) = sample.questions
        first, answered, second = re.fullmatch(
            r"Below is.+?often\.\n(.+)\nQuestion.+?list are:(1\. .+?)\nBelow is.+?often\.\n(.+)\n",
            sample.context,
        ).groups()
        for text, (common, other), answers in (
            (first, example[:2], listed_words(answered)),
            (second, main, list(asked.answers)),
        ):
            counted = Counter(listed_words(text))
            assert Counter(counted.values()) == {common: 10, other: len(counted) - 10}
            assert {word for word, times in counted.items() if times == common} == set(answers)
        assert len(Counter(listed_words(first))) == example[2]


def test_long_lists_of_common_words_have_rulers_frequencies():
    made = make_benchmark("ruler:length=4096,per_task=1,tasks=cwe,seed=1")._generate_samples(
        lambda text: len(text.split())
    )
    first, second = (Counter(listed_words(text)) for text in next(made).context.split("\n")[1::3])
    assert Counter(first.values()) == {10: 10, 3: 30}
    assert Counter(second.values()) == {30: 10, 3: len(second) - 10}


def test_coded_words_are_recounted(made):
    for sample in made["fwe"]:
        coded = sample.context.removesuffix("\n").split("coded words. ")[1].split(" ")
        (dots, _), *ranked = Counter(coded).most_common()
        assert dots == "..." and all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked)
        top = [times for _, times in ranked[:4]]
        assert (
            tuple(word for word, _ in ranked[:3]) == sample.questions[0].answers
            and len({*top}) == 4
        )


@pytest.mark.parametrize("units", [74, 100, 333, 5000])
def test_coded_words_follow_the_zeta_distribution(units):
    told = (
        find_frequent_words(9 * 50)
        .draft(units, random.Random(0))
        .context.split("coded words. ")[1]
        .split()
    )
    counts = [times for _, times in Counter(told).most_common()]
    zeta = sum(1 / k**2 for k in range(1, 2_000_001))
    assert counts == [int(units / k**2 / zeta) for k in range(1, 10) if int(units / k**2 / zeta)]


def documents_in(context):
    parts = re.split(
        r"(?:^|\n\n)Document (\d+):\n",
        context.split("given documents.\n\n", 1)[1].removesuffix("\n\n"),
    )
    assert [int(number) for number in parts[1::2]] == list(range(1, len(parts) // 2 + 1))
    return parts[2::2]


def test_generated_documents_answer_alone(made):
    for sample in made["qa_1"]:
        (asked,) = sample.questions
        town = re.search(
            r"in ([A-Z]\w+)\?|of ([A-Z]\w+) held|founded ([A-Z]\w+)\?|was ([A-Z]\w+) founded",
            asked.text,
        )
        town = next(filter(None, town.groups()))
        about = [text for text in documents_in(sample.context) if re.search(rf"\b{town}\b", text)]
        assert (
            any(re.search(rf"\b{asked.answers[0]}\b", text) for text in about) and len(about) == 3
        )


def test_documents_come_from_the_answering_ones_outwards():
    asked = DocumentQuestion("Who?", ("he",), own=(3, 0), near=(5, 1))
    for units, must in ((2, {0, 3}), (4, {0, 1, 3, 5}), (6, {*range(6)})):
        seen = set()
        for seed in range(20):
            context = (
                ask_over_documents(tuple("abcdef"), asked).draft(units, random.Random(seed)).context
            )
            seen.add("".join(documents_in(context)))
        assert {frozenset(shown) for shown in seen} == {
            frozenset("abcdef"[index] for index in must)
        }
        assert len(seen) > 1  # in any order


def test_generated_pairs_answer_together(made):
    for sample in made["qa_2"]:
        (asked,) = sample.questions
        documents = documents_in(sample.context)
        person = re.search(r"(?:by|of) ([A-Z]\w+)", asked.text).group(1)
        (company,) = (
            found.group(1)
            for text in documents
            if (found := re.search(rf"{person} founded the company (\w+)", text))
        )
        (about,) = (text for text in documents if text.startswith(f"{company}\n"))
        assert re.search(rf"\b{asked.answers[0]}\b", about) and person not in about


@pytest.mark.parametrize("source", ["novel", "generated"])
@pytest.mark.parametrize(("length", "short"), [(1024, 80), (2048, 100)])
def test_lengths_are_filled_and_never_exceeded(tokenizer, length, short, source):
    for sample in make_benchmark(f"ruler:source={source},length={length},per_task=2").load_samples(
        tokenizer, "kvpress"
    ):
        used = tokens(tokenizer, whole(sample)) + sample.questions[0].max_new_tokens
        slack = (
            8
            if sample.questions[0].task in ESSAY_TASKS
            else DOCUMENT[source]
            if sample.questions[0].task[:2] == "qa"
            else short
        )
        assert length - slack <= used <= length, sample.id


def test_a_novel_is_the_haystack_and_every_sample_has_its_own_place_in_it(tokenizer):
    novel = " ".join(
        gzip.decompress((TEXTS / REPLACEMENTS["essays"]["file"]).read_bytes()).decode().split()
    )
    spec = "ruler:length=1024,per_task=6,tasks=niah_single_2+niah_multiquery"
    samples = list(make_benchmark(spec).load_samples(tokenizer, "kvpress"))
    places = []
    for sample in samples:
        text = re.split(r"about the numbers? afterwards\.\n", sample.context)[1]
        parts = [
            part.strip()
            for part in re.split(r"One of the special magic numbers for \S+ is: \d+\.", text)
        ]
        place = novel.find(parts[0] or parts[1])
        places.append(place)
        for part in parts:
            place = novel.find(part, place)
            assert place >= 0, "the novel's own words, in their order"
    assert len(set(places)) == 12 and max(places) - min(places) > len(novel) / 3
    again = make_benchmark(spec.replace("=6", "=2")).load_samples(tokenizer, "kvzip")
    assert [sample.context for sample in again] == [
        samples[index].context for index in (0, 1, 6, 7)
    ]
    chapter = make_benchmark(
        "ruler:length=1024,per_task=2,tasks=niah_single_2,source=generated,"
        f"essays={TEXTS / 'novels'}"
    )
    first, second = (sample.context for sample in chapter.load_samples(tokenizer, "kvpress"))
    assert all("THE SECRET GARDEN CHAPTER I" in text for text in (first, second)), (
        "files begin at their beginning"
    )


def test_what_ships_answers_qa_and_a_task_has_as_many_samples_as_there_are_questions():
    def asked_of(spec):
        return list(
            make_benchmark(f"ruler:length=1024,{spec}")._generate_samples(
                lambda text: len(text.split())
            )
        )

    samples = asked_of("per_task=80,tasks=qa_1+qa_2")
    held = {
        task: [each for each in samples if each.questions[0].task == task]
        for task in ("qa_1", "qa_2")
    }
    assert (len(held["qa_1"]), len(held["qa_2"])) == (80, 75)
    assert len({each.questions[0].text for each in samples}) == 155
    for sample in samples:
        (asked,) = sample.questions
        assert asked.answers[0] in sample.context or asked.answers[0] in ("yes", "no"), sample.id
    first = [each.questions[0].text for each in held["qa_1"][:5]]
    other = asked_of("per_task=5,tasks=qa_1,seed=1")
    assert not set(first) & {each.questions[0].text for each in other}, "the seed draws their order"


def test_another_tokenizer_gives_other_lengths(tiny_tokenizer):
    for sample in make_benchmark("ruler:length=9000,per_task=1").load_samples(
        tiny_tokenizer, "kvpress"
    ):
        assert (
            8200
            <= tokens(tiny_tokenizer, whole(sample)) + sample.questions[0].max_new_tokens
            <= 9000
        ), sample.id


@pytest.mark.parametrize("seed", range(20))
def test_the_search_agrees_with_counting_up(seed):
    rng = random.Random(seed)
    steps = [rng.choice((0, 1, 7, 300)) for _ in range(200)]
    limit = sum(steps[: rng.randrange(200)]) + seed % 2
    assert find_most_units(lambda n: sum(steps[:n]), limit, 0, 200) == max(
        n
        for n in range(201)
        if sum(steps[:n]) <= limit and (n == 200 or sum(steps[: n + 1]) > limit)
    )


@pytest.mark.slow
def test_samples_are_the_same_in_another_process(tokenizer):
    spec = "ruler:length=1024,per_task=1,seed=5"

    def asked(spec):
        return digest_samples(make_benchmark(spec).load_samples(tokenizer, "kvpress"))

    assert digest_elsewhere(spec) == asked(spec) != asked(spec.replace("seed=5", "seed=6"))


def test_a_sample_depends_on_its_task_and_index_alone(tokenizer, made):
    few = make_benchmark(
        "ruler:source=generated,length=2048,per_task=2,seed=3,tasks=qa_2+niah_multikey_1+vt"
    ).load_samples(tokenizer, "kvzip")
    assert {sample.id: sample for sample in few} == {
        sample.id: sample for task in ("niah_multikey_1", "vt", "qa_2") for sample in made[task][:2]
    }


def test_needles_stand_at_the_depths_of_rulers_grid():
    sentences = [f"Sentence {number} is here." for number in range(1000)]
    grid = {int(1000 * (round(100 * step / 39) / 100)) for step in range(40)}
    seen = set()
    for seed in range(50):
        text = (
            hide_needles(Essays(iter(sentences)), keys=4).draft(4000, random.Random(seed)).context
        )
        pieces = re.split(r"One of the special .+? is: \d+\.", text)
        before = [piece.count("Sentence") for piece in pieces]
        seen |= {sum(before[: index + 1]) for index in range(4)}
        assert sum(before) == 1000 and len(pieces) == 5
    assert seen <= grid and len(seen) > 35


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("ruler:tasks=niah_single_4", "no task 'niah_single_4'"),
        ("ruler:tasks=vt+", "no task ''"),
        ("ruler:per_task=0", "at least 1"),
        ("ruler:source=hub,squad=x.json", "squad= is for samples that are generated"),
        ("ruler:length=300,tasks=cwe", "cwe needs at least"),
        ("ruler:source=no/such/folder", "no file or folder"),
        ("ruler:tasks=vt+niah_single_2,essays=no/such/folder", "no file or folder"),
    ],
)
def test_mistakes_are_told_in_a_sentence(tokenizer, spec, told):
    with pytest.raises(RestoreKVError, match=told) as caught:
        list(make_benchmark(spec).load_samples(tokenizer, "kvpress"))
    assert "\n" not in str(caught.value)


def test_stand_ins_are_described_task_by_task():
    told = make_benchmark("ruler:source=generated").to_json()
    assert set(told["stand_ins"]) == {*ESSAY_TASKS, "qa_1", "qa_2"} and len(ESSAY_TASKS) == 5
    assert "SQuAD" in told["stand_ins"]["qa_1"] and "not RULER's own" in told["data"]
    assert (
        make_benchmark("ruler:tasks=vt+cwe").to_json()["stand_ins"] == {} and "subsets" not in told
    )
    novel = make_benchmark("ruler").to_json()
    assert (
        novel["subsets"]
        == "qa_1 and qa_2 on subsets (XQuAD's English part; 75 of HotpotQA's 100 dev examples)"
    )
    assert set(novel["stand_ins"]) == set(told["stand_ins"]) and set(novel["files"]) == {
        "essays",
        "squad",
        "hotpot",
    }
    assert (
        "Secret Garden" in novel["stand_ins"]["niah_single_2"]
        and "subset" in novel["stand_ins"]["qa_2"]
    )
    assert (
        "CC BY-SA" in novel["license"]
        and "subsets" not in make_benchmark("ruler:tasks=vt+cwe").to_json()
    )
    assert set(make_benchmark("ruler:tasks=vt+cwe+fwe,length=1024").to_json()["stand_ins"]) == {
        "vt",
        "cwe",
    }
    assert make_benchmark("ruler:source=hub").to_json()["data"] == "simonjegou/ruler"
    assert make_benchmark("ruler:tasks=vt+qa_1").group_tasks() == {
        "multi-hop tracing": ("vt",),
        "question answering": ("qa_1",),
    }
    assert (
        make_benchmark("ruler").spec == "ruler"
        and make_benchmark("ruler:length=512").spec == "ruler:length=512"
    )
