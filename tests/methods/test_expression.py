"""Methods as people type them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rarebit as rb
from rarebit.errors import SettingsError
from rarebit.technique import (
    Expression,
    Part,
    parse_techniques,
    read_value,
    split_text,
    technique_from_mapping,
    technique_name,
    technique_text,
)

SHAPES = [(1000, 8)]


def texts(text: str) -> list[str]:
    return [expression.text for expression in parse_techniques(text)]


def test_an_expression_is_read_as_it_is_written():
    baseline, both, low_rank = parse_techniques(
        "baseline,hashing:buckets=1000+low-rank:rank=4,low-rank"
    )
    assert baseline == Expression(())
    assert both.parts == (Part("hashing", (("buckets", 1000),)), Part("low-rank", (("rank", 4),)))
    assert both.build(SHAPES, 1.0) == (rb.Hashing(buckets=1000), rb.LowRank(rank=4))
    assert low_rank.parts == (Part("low-rank"),)
    assert low_rank.build(SHAPES, 0.5) == (rb.LowRank.for_share(SHAPES, 0.5),)
    assert baseline.build(SHAPES, 0.5) == ()


@pytest.mark.parametrize(
    ("typed", "canonical"),
    [
        ("baseline", ["baseline"]),
        ("low_rank", ["low-rank"]),
        (" low-rank : rank = 4 , hashing ", ["low-rank:rank=4", "hashing"]),
        ("hashing:buckets=1_000+low_rank", ["hashing:buckets=1000+low-rank"]),
        ("low-rank,low-rank", ["low-rank", "low-rank"]),
    ],
)
def test_there_is_one_form(typed, canonical):
    assert texts(typed) == canonical
    assert [str(expression) for expression in parse_techniques(typed)] == canonical


@pytest.mark.parametrize(
    ("typed", "canonical"),
    [
        ("toy-words:sizes=[3,4]:word=other", "toy-words:word=other:sizes=[3,4]"),
        ("toy-words:count=3:rate=1:word=plain:sizes=[1, 2]:is_on=false", "toy-words"),
        ("toy-words:is-on=true:both=auto", "toy-words:is_on=true"),
        ("toy-words:both=2", "toy-words:both=2.0"),
        ("toy-words:rate=1e20", "toy-words:rate=1e20"),
        ("toy-words:word='a,b+c:d=e'", 'toy-words:word="a,b+c:d=e"'),
        ("toy-words:word='4'", 'toy-words:word="4"'),
        ("toy-words:word='true'", 'toy-words:word="true"'),
        ("toy-words:word='inf'", 'toy-words:word="inf"'),
        ('toy-words:word="\\u007f"', 'toy-words:word="\\u007f"'),
        ("toy-words:word=feature_dim", "toy-words:word=feature_dim"),
        ("toy-words:names=['a', 'b']", 'toy-words:names=["a","b"]'),
        ("hashing:buckets=5+toy-words:word=x", "hashing:buckets=5+toy-words:word=x"),
    ],
)
def test_settings_come_in_declared_order_without_defaults(toy_methods, typed, canonical):
    assert toy_methods
    assert texts(typed) == [canonical]
    assert texts(canonical) == [canonical]


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "word": WORDS
        | st.sampled_from(["true", "nan", "1", "1e3", "a b", " a", "2020-01-01", "[", ""]),
        "rate": FLOATS,
        "count": INTEGERS,
        "is_on": st.booleans(),
        "sizes": st.lists(INTEGERS, max_size=3).map(tuple),
        "names": st.lists(WORDS, max_size=3).map(tuple),
        "both": FLOATS | st.just("auto"),
    },
)


@pytest.mark.slow
@settings(max_examples=300)
@given(first=st.none() | st.integers(1, 10**9), values=VALUES)
def test_the_text_of_any_settings_is_read_back(toy_methods, first, values):
    wanted = toy_methods["toy-words"](**values)
    hashing = [] if first is None else [rb.Hashing(buckets=first)]
    text = "+".join(technique_text(method) for method in (*hashing, wanted))
    both = parse_techniques(f"{text},baseline,{text}")
    assert [expression.text for expression in both] == [text, "baseline", text]
    assert both[0].build(SHAPES, 1.0) == (*hashing, wanted)
    assert both[0] == both[2]
    assert hash(both[0]) == hash(both[2])


@given(text=st.text(st.sampled_from("ab=+:,[]\"'\\ 1"), max_size=12))
def test_any_text_is_read_or_refused_in_a_sentence(text):
    try:
        expressions = parse_techniques(text)
    except SettingsError as error:
        assert str(error)  # noqa: PT017  # what comes back otherwise is looked at below
    else:
        assert texts(",".join(e.text for e in expressions)) == [e.text for e in expressions]


@given(pieces=st.lists(st.text(st.characters(exclude_characters=",[]\"'"), max_size=5), min_size=1))
def test_without_quotes_and_lists_splitting_is_plain(pieces):
    assert split_text(",".join(pieces), ",") == [piece.strip() for piece in pieces]


def test_a_value_cannot_smuggle_in_another():
    assert read_value("1\nother = 2") == "1\nother = 2"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("", "expected the name of a method before and after each comma, got nothing"),
        ("low-rank,,hashing", "expected the name of a method before and after each comma"),
        ("low-rank+", r"expected the name of a method, as in hashing\+low-rank, got 'low-rank\+'"),
        (":rank=4", "expected the name of a method, as in .*, got ':rank=4'"),
        ("low-rnk", "unknown method 'low-rnk'; did you mean 'low-rank'"),
        ("low_rnk", "unknown method 'low_rnk'; did you mean 'low-rank'"),
        ("basline", "unknown method 'basline'; did you mean 'baseline'"),
        ("xyzzy", "unknown method 'xyzzy'; known: adam-ar, aligned-sets, baseline"),
        ("_counts", "unknown method '_counts'"),
        ("low-rank:rnak=4", "method low-rank: unknown setting 'rnak'; did you mean 'rank'"),
        ("low-rank:rank=four", "method low-rank: rank must be int, got 'four'"),
        ("low-rank:rank=1.5", "method low-rank: rank must be int, got 1.5"),
        ("low-rank:rank=0", "rank must be at least 1, got rank=0"),
        ("low-rank:rank", "expected setting=value after each colon, got 'low-rank:rank'"),
        ("low-rank:rank=", "expected setting=value after each colon, got 'low-rank:rank='"),
        ("low-rank:rank=4:rank=5", "rank is given twice in 'low-rank:rank=4:rank=5'"),
        ("baseline+low-rank", r"baseline means plain tables and stands alone, got 'baseline\+"),
        ("low-rank+baseline", r"stands alone, got 'low-rank\+baseline'"),
        ("baseline:rank=4", "stands alone, got 'baseline:rank=4'"),
        (
            "low-rank+hashing",
            r"low-rank\+hashing is refused: .* write hashing\+low-rank, or merge first",
        ),
        ("hashing+hashing", r"hashing\+hashing is refused: hashing is there twice; use one"),
        (
            "hashing+low-rank+hashing",
            r"hashing\+hashing is refused: hashing is there twice; use one",
        ),
        ("low-rank+low_rank", r"low-rank\+low-rank is refused: low-rank is there twice"),
    ],
)
def test_a_mistake_is_told(typed, message):
    with pytest.raises(SettingsError, match=message):
        parse_techniques(typed)


@pytest.mark.parametrize("typed", ["toy-factor+low-rank", "low-rank+toy-factor"])
def test_a_method_without_a_rank_stands_alone(toy_methods, typed):
    assert toy_methods
    assert texts("toy-factor:factor=2") == ["toy-factor:factor=2.0"]
    first, then = typed.split("+")
    message = rf"{first}\+{then} is refused: toy-factor declares no rank"
    with pytest.raises(SettingsError, match=message):
        parse_techniques(typed)


def test_what_is_given_beside_the_size_is_kept(toy_methods):
    [expression] = parse_techniques("toy-sized:word=other")
    assert expression.build(SHAPES, 0.25) == (toy_methods["toy-sized"](size=25, word="other"),)


def test_a_part_that_needs_no_size_leaves_the_whole_share_to_others(toy_methods):
    [expression] = parse_techniques("hashing+toy-words")
    methods = expression.build(SHAPES, 0.25)
    assert methods == (rb.Hashing(buckets=250), toy_methods["toy-words"]())


def test_a_setting_that_is_missing_and_not_a_size_is_asked_for(toy_methods):
    assert toy_methods
    [expression] = parse_techniques("toy-factor")
    with pytest.raises(SettingsError, match="method toy-factor: ToyFactor needs factor"):
        expression.build(SHAPES, 0.5)


def test_a_name_is_what_people_type():
    assert technique_name(rb.LowRank) == technique_name(rb.LowRank(rank=2)) == "low-rank"
    assert technique_name(rb.Hashing) == "hashing"
    for name in ("low-rank", "low_rank"):
        assert technique_from_mapping({"method": name, "rank": 3}) == rb.LowRank(rank=3)


def test_a_method_from_elsewhere_goes_by_its_class():
    class Hashing(rb.Hashing):
        pass

    assert technique_name(Hashing) == "Hashing"
    Hashing.__module__ = "elsewhere.low_rank"
    assert technique_name(Hashing) == "Hashing"


@pytest.mark.parametrize("first", ["mlet", "product-start", "hashing:buckets=9+mlet"])
def test_what_only_training_needs_may_be_cut_after_it(first):
    typed = f"{first}+low-rank:rank=4:after_training=true"
    assert texts(typed) == [typed]
    [expression] = parse_techniques(f"{first}+low-rank:after_training=true")
    assert expression.build(SHAPES, 0.5)[-1].after_training
    for early in ("low-rank", "low-rank:rank=4", "low-rank:after_training=false"):
        with pytest.raises(SettingsError, match="low-rank is refused: "):
            parse_techniques(f"{first}+{early}")


@pytest.mark.parametrize("first", ["low-rank:rank=9", "quantize"])
def test_what_stays_after_training_is_refused_as_ever(first):
    with pytest.raises(SettingsError, match=r"\+low-rank is refused: "):
        parse_techniques(f"{first}+low-rank:rank=4:after_training=true")
