"""The text and the language model of recipes/text: words by number, LSTM layers, dropouts."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from rarebit.errors import DataError

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "text"


def load(name):
    spec = importlib.util.spec_from_file_location(f"transfer{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


text_of, language_model = load("_text"), load("_language_model")
SIZES = language_model.Sizes(layers=2, dim=16, hidden=24)


@pytest.fixture(scope="module")
def text():
    return text_of.make_text(lines=24, length=60)


def write(folder, pattern, **parts):
    for part, words in parts.items():
        (folder / pattern.format(part)).write_text(words, encoding="utf-8")


@pytest.mark.parametrize("pattern", ["wiki.{}.tokens", "{}.txt"])
def test_words_are_numbered_by_count_and_lines_end(tmp_path, pattern):
    write(
        tmp_path,
        pattern,
        train=" \n b a <unk> b \n b \u2028 c\n",
        valid=" a z \n",
        test="c",
    )
    text = text_of.read_text(tmp_path)
    assert text.words == ("<eos>", "b", "<unk>", "a", "c")
    assert text.counts.tolist() == [3, 3, 1, 1, 1, 0, 0, 0]  # a multiple of 8
    assert text.train.tolist() == [0, 1, 3, 2, 1, 0, 1, 4, 0]
    assert text.valid.tolist() == [3, 2, 0]
    assert text.test.tolist() == [4, 0]
    assert text.is_head.nonzero()[:, 0].tolist() == [0]  # a fifth of five words
    assert text.described()["words"] == 5


def test_a_wrong_folder_is_told(tmp_path):
    with pytest.raises(
        DataError, match=r"wiki\.train\.tokens.*it holds nothing; unpack WikiText-2"
    ):
        text_of.read_text(tmp_path)
    (tmp_path / "wiki.train.tokens").write_text("a")
    with pytest.raises(DataError, match=r"it holds wiki\.train\.tokens; unpack"):
        text_of.read_text(tmp_path)
    with pytest.raises(DataError, match="it is no folder"):
        text_of.read_text(tmp_path / "no")


def test_a_word_that_training_lacks_needs_unk(tmp_path):
    write(tmp_path, "{}.txt", train="a b", valid="a", test="a z")
    with pytest.raises(DataError, match="the test part has the word 'z'"):
        text_of.read_text(tmp_path)


def test_the_model_is_a_stack_of_lstm_layers_with_tied_weights(text):
    model = language_model.LanguageModel(len(text.counts), SIZES).eval()
    assert model.decoder.weight is model.embedding.weight
    tokens = text.train[:60].reshape(20, 3)
    expected = model.embedding(tokens)
    for layer in model.layers:
        expected = layer(expected)[0]
    found = model(tokens, model.start(3))
    torch.testing.assert_close(found.logits, F.linear(expected, model.embedding.weight))
    torch.testing.assert_close(found.size, expected.square().mean())
    torch.testing.assert_close(found.change, expected.diff(dim=0).square().mean())


def test_states_are_carried_from_batch_to_batch(text):
    model = language_model.LanguageModel(len(text.counts), SIZES).eval()
    tokens = text.train[:60].reshape(20, 3)
    first = model(tokens[:8], model.start(3))
    second = model(tokens[8:], first.hidden)
    whole = model(tokens, model.start(3)).logits
    torch.testing.assert_close(torch.cat([first.logits, second.logits]), whole)


def test_each_dropout_has_one_mask_for_a_batch(text):
    none = dict.fromkeys(
        ["word_dropout", "input_dropout", "hidden_dropout", "output_dropout", "weight_drop"], 0.0
    )

    def model(**chances):
        sizes = dataclasses.replace(SIZES, **none | chances)
        return language_model.LanguageModel(len(text.counts), sizes)

    tokens = torch.tensor([[3, 5], [7, 3], [5, 7]])
    rows = model(word_dropout=0.5)._words(tokens)
    dropped = (rows == 0).all(dim=-1)
    assert 0 < int(dropped.sum()) < 6
    for word in (3, 5, 7):
        assert len(dropped[tokens == word].unique()) == 1
    locked = model()._locked(torch.ones(6, 2, 50), 0.5)
    assert torch.equal(locked, locked[:1].expand_as(locked))
    assert sorted(locked.unique().tolist()) == [0.0, 2.0]
    plain, dropping = model(), model(weight_drop=0.5)
    dropping.load_state_dict(plain.state_dict())
    start = plain.start(2)
    torch.testing.assert_close(plain(tokens, start).logits, plain.eval()(tokens, start).logits)
    dropping(tokens, start).logits.square().sum().backward()
    gradients = dropping.layers[0].weight_hh_l0.grad
    assert 0.3 < float((gradients == 0).float().mean()) < 0.7
    assert not (dropping.layers[0].weight_ih_l0.grad == 0).all()
