"""On the built-in click log, models come close to the best any model could reach."""

import pytest

import rarebit as rb


@pytest.mark.slow
@pytest.mark.threads(2)
@pytest.mark.parametrize("model", ["deepfm", "dcn_v2"])
def test_within_a_hundredth_of_the_ceiling(model):
    training = rb.Training(epochs=1)
    test = rb.run(rb.RunSettings(model=model, training=training), progress=False).test
    assert test.ceiling.auc - test.auc < 0.01
    assert test.auc < test.ceiling.auc  # or the probabilities are not the truth
    assert test.rarest_ceiling.auc - test.rarest.auc > test.ceiling.auc - test.auc
