"""What all compressors of the literature promise, besides the contract of methods."""

import pytest
from capabilities import slow_after
from torch import nn

import rarebit as rb
from rarebit.research._compressors import Compressor
from rarebit.tables.table import stored_tensors
from rarebit.technique import parse_techniques, technique_class, technique_names
from rarebit.testing import check_resumes

NAMES = [name for name in technique_names() if issubclass(technique_class(name), Compressor)]


def test_all_compressors_are_found():
    assert len(NAMES) >= 9


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "width"), [(300, 8), (1001, 7)])
def test_what_is_stored_at_inference_is_what_the_size_was_chosen_by(name, rows, width):
    method = technique_class(name).for_share([(rows, width)], share=0.5)
    table = method.wrap(nn.Embedding(rows, width)).served()
    num_bytes = sum(tensor.nbytes for tensor in stored_tensors(table))
    assert -(-num_bytes // 4) == method.stored(rows, width) <= 0.5 * rows * width


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_sized_by_a_share_of_all_tables(name):
    shapes = [(2000, 16), (300, 16), (9, 16)]
    (expression,) = parse_techniques(name)
    (method,) = expression.build(shapes, 0.25)
    model = nn.ModuleList(nn.Embedding(*shape) for shape in shapes)
    changes = rb.apply_(model, method, verbose=False)
    # a table of nine rows stays plain where it would become larger
    assert ("2" in dict(changes.skipped)) == (method.stored(9, 16) > 9 * 16)
    assert 0.15 < method.kept(shapes) <= 0.25


@pytest.mark.parametrize("name", slow_after(NAMES))
def test_a_stopped_run_resumes_to_the_same_bits(name):
    check_resumes(technique_class(name).for_share([(2000, 4), (300, 4)], share=0.5))


@pytest.mark.parametrize("name", slow_after(NAMES))
def test_a_run_trains(name):
    settings = rb.RunSettings(
        model="fm",
        data=rb.data.SyntheticLog(rows=6_000),
        training=rb.Training(epochs=1, lr=0.01, batch_size=256),
        methods=(technique_class(name).for_share([(12_000, 16), (2_500, 16)], share=0.25),),
    )
    history = rb.run(settings, progress=False).history
    assert history.epochs[0].valid.auc > 0.65
