"""Translation: subwords, the transformer, the search for the best translation, scores, and the recipe."""

import doctest
import importlib.util
import itertools
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from capabilities import needs_package
from torch import nn

from rarebit.errors import DataError

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "text"
pytestmark = [needs_package("tokenizers"), needs_package("sacrebleu")]


def load(name):
    sys.path.insert(0, str(FOLDER))  # where a script finds its neighbours
    spec = importlib.util.spec_from_file_location(f"text_{name}", FOLDER / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shared = sys.modules.pop("_shared")
    sys.path.remove(str(FOLDER))
    return module, shared


recipe, shared = load("translation")
SIZES = recipe.Sizes(subwords=60, dim=16, heads=2, inner=16, layers=1, dropout=0.1, beam=2)
SCHEDULE = shared.Schedule(epochs=2, batch_size=64, lr=1e-2, warm_up=4)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def text():
    return recipe.Text(recipe.make_parts(), SIZES.subwords)


def task(text, **changes):
    return recipe.Translation(text, SIZES, replace(SCHEDULE, **changes), CPU)


def test_examples_of_the_recipe():
    found = doctest.testmod(recipe)
    assert found.attempted >= 1
    assert found.failed == 0


def test_subwords_are_of_the_training_text_and_give_the_sentence_back(text):
    for words, lines, encoded in zip(
        text.vocabularies, text.parts["train"], text.encoded["train"], strict=True
    ):
        assert words.get_vocab_size() <= SIZES.subwords
        assert [words.id_to_token(n) for n in range(4)] == list(recipe.SPECIAL)
        for line, ids in zip(lines[:20], encoded[:20], strict=True):
            assert ids[0] == recipe.BEGIN
            assert ids[-1] == recipe.END
            assert words.decode(ids.tolist()) == line
    assert text.vocabularies[0].encode("ä").ids[-1] == 3  # a letter that training lacks
    again = recipe.Text(recipe.make_parts(), SIZES.subwords)
    assert again.described() == text.described()


def test_padding_and_what_comes_later_change_nothing(text):
    made = task(text)
    model = made.model().eval()
    sources, targets = text.encoded["train"]
    places = sorted(range(50), key=lambda n: len(sources[n]))
    places = [places[0], places[-1]]
    source, target = made._padded(sources, places), made._padded(targets, places)
    together = model.decode(model.encode(source), source, target)
    for row, place in enumerate(places):
        one, other = sources[place][None], targets[place][None]
        alone = model.decode(model.encode(one), one, other)[0]
        torch.testing.assert_close(together[row, : len(alone)], alone, rtol=1e-4, atol=1e-5)
        begun = model.decode(model.encode(one), one, other[:, :3])[0]
        torch.testing.assert_close(begun, alone[:3], rtol=1e-4, atol=1e-5)


class Chances(nn.Module):
    """Made-up chances of a word after a sequence, of 5 words."""

    def encode(self, source):
        return source[:, :, None].float()

    def decode(self, memory, source, target):
        seed = memory.sum((1, 2)).long()
        rows = []
        for number, line in zip(seed.tolist(), target.tolist(), strict=True):
            mixed = sum((place + 1) * 7**word for place, word in enumerate(line))
            random = torch.Generator().manual_seed(number * 100_003 + mixed)
            rows.append(2 * torch.randn(5, generator=random))
        return torch.stack(rows)[:, None]


def best_translations(model, source, longest):
    """Return the best of all sequences, by their mean score."""
    found = []
    for line in source:
        scored = {}
        for words in itertools.product((recipe.END, 3, 4), repeat=longest):
            stop = words.index(recipe.END) + 1 if recipe.END in words else longest
            total, before = 0.0, [recipe.BEGIN]
            for word in words[:stop]:
                logits = model.decode(model.encode(line[None]), line[None], torch.tensor([before]))
                total += float(logits[0, -1].log_softmax(0)[word])
                before.append(word)
            scored[words[:stop]] = total / stop
        found.append(max(scored, key=scored.__getitem__))
    return found


def plain(tokens):
    return [tuple(word for word in line if word != recipe.PAD) for line in tokens.tolist()]


def test_a_wide_search_finds_the_best_of_all_translations():
    source = torch.arange(1, 25)[:, None]
    found = recipe.translate(Chances(), source, beam=30, longest=3)
    assert plain(found) == best_translations(Chances(), source, 3)
    assert {len(line) for line in plain(found)} == {1, 2, 3}
    greedy = plain(recipe.translate(Chances(), source, beam=1, longest=3))
    assert greedy != plain(found)
    for line, words in zip(source, greedy, strict=True):
        before = [recipe.BEGIN]
        for word in words:
            logits = Chances().decode(line[None, :, None], None, torch.tensor([before]))[0, -1]
            assert word == int(logits[2:].argmax()) + 2  # no padding, no beginning
            before.append(word)
        assert words[-1] == recipe.END or len(words) == 3


def test_sentences_with_rare_words_are_apart(text, monkeypatch):
    import sacrebleu

    made = task(text)
    lines, references = text.parts["test"]
    counted = Counter(word for line in text.parts["train"][0] for word in recipe.words_of(line))
    fifth = sorted(counted, key=lambda word: (-counted[word], word))[: round(len(counted) / 5)]
    is_head = [set(recipe.words_of(line)) <= set(fifth) for line in lines]
    guesses = [line if n % 3 else line.replace("A", "X") for n, line in enumerate(references)]
    monkeypatch.setattr(made, "translations", lambda model, part, beam: guesses)
    found = made.scores(made.model(), "test")
    assert found["sentences"] == {"head": sum(is_head), "tail": len(lines) - sum(is_head)}
    for name, wanted in (("all", (True, False)), ("head", (True,)), ("tail", (False,))):
        chosen = [n for n, head in enumerate(is_head) if head in wanted]
        pairs = [guesses[n] for n in chosen], [[references[n] for n in chosen]]
        assert found[name] == (sacrebleu.corpus_bleu(*pairs).score if chosen else None)
    assert found["chrF"] == sacrebleu.corpus_chrf(guesses, [references]).score


def test_counts_are_those_of_the_subwords(text):
    made = task(text)
    counts = made.counts_of(recipe.Translator)
    sources, targets = text.encoded["train"]
    expected = torch.cat(sources).bincount(minlength=text.sizes[0])
    assert torch.equal(counts["source"], expected)
    # the decoder reads all but the last subword; in a batch that is the end, or padding
    ends = sum(len(targets) for targets in [targets])
    found = counts["target"]
    assert found.sum() <= sum(map(len, targets))
    assert found[recipe.BEGIN] == ends
    inside = torch.cat([line[1:-1] for line in targets]).bincount(minlength=text.sizes[1])
    inside[recipe.BEGIN] += ends
    assert torch.equal(found[3:], inside[3:])


def trained(made, steps=None):
    while made.step != steps and not made.train_step(lambda line: None):
        pass
    return made


@pytest.mark.parametrize(
    "arm", ["adversarial-lexico", pytest.param("tail", marks=pytest.mark.slow)]
)
def test_a_stopped_run_resumes_to_the_bit(text, tmp_path, arm):
    run = shared.Run(arm=arm)
    whole = trained(task(text).training(run)).result()
    made = trained(task(text).training(run), 9)
    shared.CheckpointFolder(tmp_path).write("step", made.state())
    again = task(text).training(run)
    torch.rand(3)
    again.load(shared.CheckpointFolder(tmp_path).read("step"))
    assert trained(again).result() == whole


@pytest.mark.slow
def test_it_learns_to_translate(tmp_path, capsys):
    chosen = ["--small", "--seeds", "1", "--epochs", "14", "--out", str(tmp_path)]
    report = recipe.main([*chosen, "--arms", "baseline,averaged", "--compress"])
    found = report["results"]["baseline"]["0"]
    assert found["test"]["all"] > 40
    assert [point["compressor"] for point in found["compressed"]][:2] == [
        "none",
        "evidence coding 1/4",
    ]
    assert found["compressed"][0]["all"] == found["test"]["all"]
    stored = json.loads((tmp_path / "text-translation.json").read_text("utf-8"))
    assert stored["results"] == json.loads(json.dumps(report["results"]))
    assert "BLEU" in (tmp_path / "text-translation.html").read_text("utf-8")


def test_files_are_read(tmp_path):
    for name in recipe.FILES.values():
        (tmp_path / f"{name}.de").write_text("Ein Mann.\nZwei\u2028Frauen.\n")
        (tmp_path / f"{name}.en").write_text("A man.\nTwo women.\n")
    assert recipe.read_parts(tmp_path)["valid"] == (
        ["Ein Mann.", "Zwei\u2028Frauen."],
        ["A man.", "Two women."],
    )
    (tmp_path / "val.en").write_text("A man.\n")
    with pytest.raises(
        DataError, match=r"val\.de and val\.en must have as many lines, got 2 and 1"
    ):
        recipe.read_parts(tmp_path)
    with pytest.raises(DataError, match=r"must hold train\.de, train\.en, val\.de"):
        recipe.read_parts(tmp_path / "no")


@needs_package("transformers")
@pytest.mark.slow
def test_a_hugging_face_model_of_a_configuration(tmp_path):
    from transformers import T5Config

    T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=1
    ).save_pretrained(tmp_path)
    text = recipe.Text(recipe.make_parts(), 100, joint=True)
    made = recipe.Translation(text, SIZES, SCHEDULE, CPU, str(tmp_path))
    run = trained(made.training(shared.Run(arm="cosreg-lexico")))
    assert run.result()["test"]["all"] is not None
    [stream] = made.streams(run.model).values()
    assert len(stream) == sum(len(line) for side in text.encoded["train"] for line in side)
