"""The recipe of the tiny model: what its rows teach, and that it runs and resumes."""

import pytest
import torch

from recipes.tiny import examples, pretrain
from recipes.tiny import tokenizer as recipe_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    recipe_tokenizer.train_tokenizer(200).save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def sampler(folder):
    return examples.Sampler(pretrain.AutoTokenizer.from_pretrained(folder / "model"))


def test_a_step_names_its_batch(sampler):
    first, second, other = (
        sampler.batch(step, 3, 48, 96, 3, 1.0, 500, pretrain.FACTS) for step in (7, 7, 8)
    )
    assert torch.equal(first.ids, second.ids) and torch.equal(first.mask, second.mask)
    assert first.ids.shape != other.ids.shape or not torch.equal(first.ids, other.ids)


def test_blocks_see_the_document_and_themselves_only(sampler):
    batch = sampler.batch(1, 4, 48, 96, 3, 0.5, 500, pretrain.FACTS)
    for row in range(4):
        question = batch.question[row]
        for number in range(len(batch.families[row])):
            inside = (question == number).nonzero()[:, 0]
            other = (question >= 0) & (question != number)
            seen = batch.mask[row, 0, inside[-1]]
            assert not (seen & other).any()
            assert seen[inside].all() and seen[0]
            assert int(batch.positions[row, inside[0]]) > int(
                batch.positions[row, : inside[0]][question[: inside[0]] < 0][0]
            )
            assert batch.positions[row, inside].diff().eq(1).all()


def test_answers_are_what_the_loss_is_on(sampler):
    batch = sampler.batch(2, 2, 48, 96, 2, 0.5, 500, pretrain.FACTS)
    row = batch.question[0] == 0
    told = (batch.part[0] == examples.ANSWER) & row
    answer = sampler.tokenizer.decode(batch.ids[0].roll(-1)[told])
    assert answer.startswith(" ") and answer.endswith("<|im_end|>")


def test_pretraining_runs_and_resumes_where_it_stopped(folder, monkeypatch):
    monkeypatch.setattr(
        pretrain, "STAGES", (pretrain.Stage(9, 24, 30, 1, 1, 1.0, 0.02, 1.0, pretrain.FACTS),)
    )
    recipe = pretrain.Recipe(hidden=32, layers=1, heads=2, kv_heads=1, ffn=32)
    pretrain.pretrain(folder, recipe, 2, 10.0)
    assert torch.load(folder / "state.pt", weights_only=True)["step"] == 2
    pretrain.pretrain(folder, recipe, 3, 10.0)
    assert torch.load(folder / "state.pt", weights_only=True)["step"] == 3
    assert (folder / "model" / "model.safetensors").exists()
