"""Named entities: conlleval's rules, the CRF against all sequences, batches, groups of words, and the recipe."""

import doctest
import importlib.util
import itertools
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from capabilities import needs_package
from torch.nn import functional as F

import rarebit as rb
from rarebit.errors import DataError

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "text"


def load(name):
    sys.path.insert(0, str(FOLDER))  # where a script finds its neighbours
    spec = importlib.util.spec_from_file_location(f"text_{name}", FOLDER / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shared = sys.modules.pop("_shared")
    sys.path.remove(str(FOLDER))
    return module, shared


ner, shared = load("ner")
SIZES = ner.Sizes(word_dim=6, letter_dim=4, filters=5, hidden=4)
SCHEDULE = shared.Schedule(epochs=2, batch_size=4, lr=1e-2, warm_up=4)
CPU = torch.device("cpu")


def sentence(text, tags):
    return text.split(), tags.split()


@pytest.fixture
def text():
    train = [
        sentence("Anna saw Paris", "I-PER O I-LOC"),
        sentence("Anna of Paris saw Bo 17", "I-PER I-PER I-PER O I-PER O"),
        sentence("Paris , Rome , Oslo", "I-LOC O I-LOC O I-LOC"),
        sentence("yes", "O"),
        sentence("Anna , Anna", "I-PER O I-PER"),
    ]
    test = [sentence("Anna met Zed in Rome", "I-PER O I-PER O I-LOC")]
    return ner.Text([train, train[:2], test])


def task(text, **changes):
    return ner.NER(text, SIZES, shared.replace(SCHEDULE, **changes), CPU)


def test_examples_of_the_recipe():
    for module in (ner, shared):
        found = doctest.testmod(module)
        assert found.attempted >= 1
        assert found.failed == 0


# worked out by hand with the rules of conlleval: begins at B, after O, and where the kind changes
@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O O", []),
        ("I-A I-A O", [(0, 2, "A")]),
        ("B-A I-A B-A", [(0, 2, "A"), (2, 3, "A")]),
        ("I-A B-A I-A", [(0, 1, "A"), (1, 3, "A")]),
        ("I-A I-B I-B", [(0, 1, "A"), (1, 3, "B")]),
        ("B-A I-B", [(0, 1, "A"), (1, 2, "B")]),
        ("O I-A", [(1, 2, "A")]),
        ("B-A B-A", [(0, 1, "A"), (1, 2, "A")]),
    ],
)
def test_entities_by_conllevals_rules(tags, expected):
    assert ner.spans(tags.split()) == expected
    assert ner.spans(ner.iob(ner.iobes(tags.split()))) == expected


def test_f1_is_that_of_a_published_example():
    """The example in the README of seqeval, which is checked against conlleval: F1 of 0.5."""
    true = sentence("a b c d e f g", "O O O B-MISC I-MISC I-MISC O")
    other = sentence("John Smith x", "B-PER I-PER O")
    text = ner.Text([[true, other]] * 3)
    guessed = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    assert ner.entity_f1(text, [true, other], guessed)["all"] == 50.0


def test_entities_are_apart_by_their_rarest_word(text):
    # Anna, "," four and three times; a fifth of nine words is two
    assert [w for w, head in zip(text.words, text.is_head, strict=True) if head] == ["anna", ","]
    assert text.group(["Anna"]) == "head"
    assert text.group(["ANNA", "Paris"]) == "tail"
    assert text.group(["Paris", "Zed"]) == "unseen"
    [(words, tags)] = text.sentences["test"]
    guesses = ["B-PER", "O", "B-PER", "I-PER", "B-LOC"]
    found = ner.entity_f1(text, [(words, tags)], [guesses])
    assert found["all"] == pytest.approx(100 * 2 * 2 / (3 + 3))
    assert found["head"] == 100.0
    assert found["tail"] == 100.0
    assert found["unseen"] == 0.0
    assert found["entities"] == {"all": 3, "head": 1, "tail": 1, "unseen": 1}
    none = ner.entity_f1(text, [(["yes"], ["O"])], [["O"]])
    assert none["all"] is None


@pytest.mark.parametrize("lengths", [(4, 2, 1), (3, 3, 3)])
def test_the_crf_is_that_of_all_sequences(lengths):
    tags, longest = 3, max(lengths)
    crf = ner.CRF(tags).double().requires_grad_(False)
    for parameter in crf.parameters():
        torch.nn.init.normal_(parameter)
    scores = torch.randn(len(lengths), longest, tags, dtype=torch.float64)
    gold = torch.randint(tags, (len(lengths), longest))
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    losses, decoded = crf(scores, gold, mask), crf.decode(scores, mask)
    for row, length in enumerate(lengths):

        def score(path, row=row):
            total = crf.first[path[0]] + crf.last[path[-1]]
            total = total + sum(scores[row, place, tag] for place, tag in enumerate(path))
            return float(total + sum(crf.between[a, b] for a, b in itertools.pairwise(path)))

        every = {path: score(path) for path in itertools.product(range(tags), repeat=length)}
        partition = math.log(sum(map(math.exp, every.values())))
        own = score(gold[row, :length].tolist())
        assert float(losses[row]) == pytest.approx(partition - own)
        assert tuple(decoded[row]) == max(every, key=every.__getitem__)


def test_padding_changes_nothing(text):
    made = task(text)
    model = made.model().eval()
    encoded = text.encoded["train"]
    together = model(made._batch(encoded))
    losses = model.crf(together, made._batch(encoded).tags, made._batch(encoded).mask)
    for row, one in enumerate(encoded):
        alone = made._batch([one])
        torch.testing.assert_close(together[row, : len(one[0])], model(alone)[0])
        torch.testing.assert_close(losses[row], model.crf(model(alone), alone.tags, alone.mask)[0])


def test_the_letters_of_a_word_are_a_convolution_and_its_largest_values(text):
    model = task(text).model().eval()
    inner = model.encoder
    batch = task(text)._batch([text.encoded["train"][0]])
    rows = []
    for word in ("Anna", "saw", "Paris"):
        ids = inner.letters_of[text.types.index(word)]
        ids = F.pad(ids[ids > 0], (1, 1))
        windows = inner.letters(ids).unfold(0, 3, 1)  # (length, letter_dim, 3)
        read = torch.einsum("ldk,fdk->lf", windows, inner.cnn.weight) + inner.cnn.bias
        known = inner.words(torch.tensor(text.words.index(word.lower())))
        rows.append(torch.cat([known, read.max(0).values]))
    expected = inner.lstm(torch.stack(rows)[None])[0]
    torch.testing.assert_close(inner(batch), expected)


def test_every_sentence_is_in_an_epoch_once(text):
    made = task(text, batch_size=2)
    epochs = [made.batches(3, epoch) for epoch in (0, 0, 1)]
    lines = [
        [tuple(line[line > 0].tolist()) for b in epoch for line in b.types] for epoch in epochs
    ]
    assert lines[0] == lines[1] != lines[2]
    assert sorted(lines[0]) == sorted(tuple(types.tolist()) for types, _ in text.encoded["train"])


def test_training_takes_some_words_that_it_sees_once_for_unknown_ones(text):
    encoder = task(text).model().encoder
    assert [w for w in text.words if text.counts[text.words.index(w)] == 1] == [
        *("00", "bo", "of", "oslo", "rome", "yes"),
    ]
    torch.manual_seed(0)
    seen = []
    encoder.words.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    batch = task(text)._batch([text.encoded["train"][1]])  # Anna of Paris saw Bo 17
    for _ in range(40):
        encoder(batch)
    share = (torch.cat(seen) == ner.UNKNOWN).float().mean(0)
    assert share[[0, 2, 3]].eq(0).all()
    assert ((share[[1, 4, 5]] > 0.2) & (share[[1, 4, 5]] < 0.8)).all()
    encoder.eval()(batch)
    assert not (seen[-1] == ner.UNKNOWN).any()


def test_counts_are_those_of_the_text(text):
    made = task(text)
    counts = made.counts_of(ner.Tagger)
    expected = text.counts.clone()
    expected[ner.UNKNOWN] = 1
    assert torch.equal(counts["encoder.words"], expected)
    found = made.word_counts(made.model())["encoder.words"]
    # every second word that training sees once
    assert found[ner.UNKNOWN] == 3
    assert found.sum() == text.counts.sum()
    assert torch.equal(found[text.counts > 1], text.counts[text.counts > 1])


def test_files_are_read(tmp_path):
    lines = (
        "-DOCSTART- -X- O O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\n\n\nPeter NNP I-NP I-PER\n"
    )
    for name in ner.FILES[0]:
        (tmp_path / name).write_text(lines)
    text = ner.read_text(tmp_path)
    expected = [(["EU", "rejects"], ["I-ORG", "O"]), (["Peter"], ["I-PER"])]
    assert text.sentences["valid"] == expected
    assert text.tags == ["O", "S-ORG", "S-PER"]
    (tmp_path / "eng.testa").write_text("EU I-ORG\nrejects\n")
    with pytest.raises(DataError, match=r"line 2 of .* must have a word and a tag, got 'rejects'"):
        ner.read_text(tmp_path)
    with pytest.raises(DataError, match=r"must hold eng\.train, eng\.testa"):
        ner.read_text(tmp_path / "no")


@pytest.fixture(scope="module")
def small():
    return ner.make_text()


def trained(made, steps=None):
    while made.step != steps and not made.train_step(lambda line: None):
        pass
    return made


def small_task(small, **changes):
    sizes = ner.Sizes(word_dim=8, letter_dim=4, filters=4, hidden=8, dropout=0.1)
    schedule = shared.Schedule(epochs=3, batch_size=32, lr=2e-2, warm_up=4)
    return ner.NER(small, sizes, shared.replace(schedule, **changes), CPU)


@pytest.mark.parametrize("arm", ["baseline", "averaged", "adversarial-lexico", "tail"])
def test_a_stopped_run_resumes_to_the_bit(small, tmp_path, arm):
    run = shared.Run(arm=arm, seed=1)
    whole = trained(small_task(small).training(run)).result()
    made = trained(small_task(small).training(run), 8)
    shared.CheckpointFolder(tmp_path).write("step", made.state())
    again = small_task(small).training(run)
    torch.rand(3)
    again.load(shared.CheckpointFolder(tmp_path).read("step"))
    assert trained(again).result() == whole


def test_arms_differ_in_what_they_say_alone(small):
    made = {arm: small_task(small).training(shared.Run(arm=arm, seed=2)) for arm in shared.ARMS}
    first = made["baseline"].model.state_dict()
    for arm, one in made.items():
        assert all(
            map(torch.equal, *([b.types for b in t.batches] for t in (one, made["baseline"])))
        )
        if arm != "tail":  # its tables are wrapped
            assert all(torch.equal(v, first[n]) for n, v in one.model.state_dict().items()), arm
    trained(made["baseline"], 4)
    after = {arm: trained(made[arm], 4).model.state_dict() for arm in ("averaged", "cosreg-sum")}
    plain = made["baseline"].model.state_dict()
    # an average follows training and does not change it
    assert all(torch.equal(value, plain[name]) for name, value in after["averaged"].items())
    assert not torch.equal(
        after["cosreg-sum"]["encoder.words.weight"], plain["encoder.words.weight"]
    )


def test_the_average_is_evaluated_and_kept(small):
    plain = small_task(small, epochs=1).training(shared.Run(arm="baseline"))
    steps = []
    while not plain.train_step(lambda line: None):
        steps.append({n: v.clone() for n, v in plain.model.named_parameters()})
    steps.append(plain.model.state_dict())
    made = trained(small_task(small, epochs=1).training(shared.Run(arm="averaged", dial=0.5)))
    decay = math.exp(-1 / (0.5 * len(steps)))
    weights = torch.tensor([decay ** (len(steps) - 1 - n) for n in range(len(steps))])
    for name, value in made.model.named_parameters():
        mean = sum(w * step[name] for w, step in zip(weights / weights.sum(), steps, strict=True))
        torch.testing.assert_close(made.best[name], mean.detach(), rtol=1e-4, atol=1e-5)
        assert not torch.equal(made.best[name], value)


def test_a_tail_ends_in_plain_tables(small):
    made = trained(small_task(small).training(shared.Run(arm="tail")))
    made.result()
    assert type(made.model.encoder.words) is torch.nn.Embedding
    assert small_task(small).model().state_dict().keys() == made.model.state_dict().keys()


def test_patience_ends_training(small):
    made = small_task(small, epochs=30, patience=2, lr=0.0).training(shared.Run(arm="baseline"))
    assert len(trained(made).history) == 3  # the first is the best
    result = made.result()
    assert result["best_epoch"] == 1
    assert not shared.is_cut_off({"0": result})


SMALL = ["--small", "--seeds", "2", "--epochs", "2", "--arms", "baseline,averaged"]


def test_results_are_stored_and_kept(tmp_path, capsys):
    chosen = [*SMALL, "--out", str(tmp_path), "--trials", "3"]
    report = ner.main(chosen)
    stored = json.loads((tmp_path / "text-ner.json").read_text("utf-8"))
    assert stored == json.loads(json.dumps(report))
    assert [len(stored["tried"][arm]) for arm in ("baseline", "averaged")] == [3, 3]
    for arm, picked in stored["picked"].items():
        tried = {(one["lr"], one["dial"]): one["valid"] for one in stored["tried"][arm]}
        assert tried[picked["lr"], picked["dial"]] == max(tried.values())
        assert list(stored["results"][arm]) == ["0", "1"]
    assert [one["control"] for one in stored["verdicts"]] == ["baseline"]
    page = (tmp_path / "text-ner.html").read_text("utf-8")
    assert "averaged" in page
    assert "http" not in page
    assert "entity F1" in capsys.readouterr().out
    assert ner.main(chosen)["results"] == report["results"]
    assert "starts" not in capsys.readouterr().out


def test_compressed_tables_are_measured_on_the_same_model(small):
    made = trained(small_task(small).training(shared.Run(arm="baseline")))
    result = made.result()
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    points = shared.compressed(made.task, made.model)
    assert points[0]["bytes"] == len(small.words) * 8 * 4
    assert points[0]["all"] == result["test"]["all"]
    names = [point["compressor"] for point in points]
    assert names[:2] == ["none", "evidence coding 1/4"]
    assert all(point["bytes"] <= points[0]["bytes"] / 4 for point in points[1:-1])
    assert all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())
    # what is measured is the model with the table looked up as it is coded
    table = torch.nn.Sequential(torch.nn.Embedding.from_pretrained(before["encoder.words.weight"]))
    rb.compress_(
        table, counts=made.task.word_counts(made.model)["encoder.words"], size="1/4", verbose=False
    )
    made.model.encoder.words = table[0]
    assert made.task.scores(made.model, "test")["all"] == points[1]["all"]


def test_compression_needs_weights_that_were_kept(tmp_path, capsys):
    chosen = [
        "--small",
        "--seeds",
        "1",
        "--epochs",
        "1",
        "--arms",
        "baseline",
        "--out",
        str(tmp_path),
    ]
    ner.main(chosen)
    found = ner.main([*chosen, "--compress"])
    assert found["missing"] == [
        "compressed tables of baseline, seed 0: it was trained without --compress; use another --out"
    ]
    found = ner.main([*chosen[:-1], str(tmp_path / "new"), "--compress"])
    assert found["results"]["baseline"]["0"]["compressed"][0]["compressor"] == "none"


@needs_package("transformers")
@pytest.mark.slow
def test_a_transformer_from_a_configuration(small, tmp_path):
    from transformers import BertConfig

    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    config.save_pretrained(tmp_path)
    made = ner.NER(
        small, ner.Sizes(), shared.Schedule(epochs=1, batch_size=32, lr=1e-3), CPU, str(tmp_path)
    )
    for arm in ("adversarial-lexico", "tail"):
        run = trained(made.training(shared.Run(arm=arm)))
        assert run.result()["test"]["all"] is not None
    model = made.model().eval()
    encoded = small.encoded["train"]
    both = made._batch([encoded[0], (encoded[1][0][:2], encoded[1][1][:2])])
    alone = made._batch([(encoded[1][0][:2], encoded[1][1][:2])])
    torch.testing.assert_close(model(both)[1, :2], model(alone)[0])
    name = "encoder.inner.embeddings.word_embeddings"
    assert torch.equal(made.counts_of(ner.Tagger)[name][2:], small.counts[2:])


@needs_package("transformers")
@pytest.mark.slow
def test_a_pretrained_encoder_reads_words_with_its_own_tokenizer(small, tmp_path):
    from transformers import BertConfig, BertModel, BertTokenizerFast

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "so", "in", "said", "it", "name"]
    vocabulary += [f"##{letter}" for letter in "abcdefghij"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    pretrained = BertModel(config)
    pretrained.save_pretrained(tmp_path)
    made = ner.NER(
        small, SIZES, shared.Schedule(epochs=1, batch_size=32, lr=1e-3), CPU, str(tmp_path)
    )
    encoder = made.model().encoder.eval()
    weight = pretrained.get_input_embeddings().weight
    assert torch.equal(encoder.inner.get_input_embeddings().weight, weight)
    assert encoder.pieces[small.types.index("Nameb")] == [9, 11]
    batch = made._batch([small.encoded["train"][0]])
    words = small.sentences["train"][0][0]
    ids, firsts = [2], []
    for word in words:
        firsts.append(len(ids))
        ids += encoder.pieces[small.types.index(word)]
    hidden = pretrained.eval()(input_ids=torch.tensor([[*ids, 3]])).last_hidden_state
    torch.testing.assert_close(encoder(batch), hidden[:, firsts])
    [stream] = made.streams(made.model()).values()
    assert len(stream) == sum(
        len(encoder.pieces[t]) for line, _ in small.encoded["train"] for t in line
    )


def test_the_best_epoch_is_the_first_with_the_highest_f1(small):
    made = small_task(small).training(shared.Run(arm="baseline"))
    made.history = [{"valid": {"all": score}} for score in (1.0, 3.0, 2.0, 3.0)]
    assert made._best_epoch() == 1
