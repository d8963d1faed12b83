import pytest

from rarebit import Training
from rarebit.errors import SettingsError


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("epochs", 0, "epochs must be at least 1, got epochs=0"),
        ("batch_size", 0, "batch_size must be at least 1, got batch_size=0"),
        ("plateau_patience", 0, "plateau_patience must be at least 1, got plateau_patience=0"),
        ("lr", 0.0, "lr must be above 0, got lr=0.0"),
        ("lr", float("nan"), "lr must be finite, got nan"),
        ("lr", float("inf"), "lr must be finite, got inf"),
        ("seed", 2**64, "seed must fit in 64 bits, got a whole number of 65 bits"),
        ("table_lr", -1.0, "table_lr must be above 0, got table_lr=-1.0"),
        ("weight_decay", -0.1, "weight_decay must be 0 or more, got weight_decay=-0.1"),
        ("table_weight_decay", -0.1, "table_weight_decay must be 0 or more, got"),
        ("momentum", -0.1, "momentum must be 0 or more, got momentum=-0.1"),
        ("seed", -1, "seed must be 0 or more, got seed=-1"),
        ("ema_decay", 1.0, "ema_decay must lie in (0, 1), got ema_decay=1.0"),
        ("ema_epochs", 0.0, "ema_epochs must be above 0, got ema_epochs=0.0"),
        ("patience", 0, "patience must be at least 1, got patience=0"),
        ("plateau_factor", 0.0, "plateau_factor must lie in (0, 1], got plateau_factor=0.0"),
        ("plateau_factor", 1.5, "plateau_factor must lie in (0, 1], got plateau_factor=1.5"),
        ("optimizer", "adamw", "optimizer must be one of 'adam', 'sgd', 'adagrad', got 'adamw'"),
        ("precision", "float16", "precision must be one of 'float32', 'bfloat16', got 'float16'"),
        ("monitor", "loss", "monitor must be one of 'auc', 'logloss', got 'loss'"),
        ("epochs", 2.5, "epochs must be int, got 2.5"),
        ("lr", "0.1", "lr must be float, got '0.1'"),
        ("patience", True, "patience must be int or 'auto' or none, got True"),
    ],
)
def test_a_wrong_value_is_refused_at_construction(name, value, message):
    with pytest.raises(SettingsError) as caught:
        Training(**{name: value})
    assert message in str(caught.value)


def test_two_decays_of_one_average_are_refused():
    message = "ema_decay=0.9 and ema_epochs=2.0 are two decays of one average; give one"
    with pytest.raises(SettingsError, match=message):
        Training(ema_decay=0.9, ema_epochs=2)


def test_a_whole_learning_rate_is_a_float():
    assert (Training(lr=1), type(Training(lr=1).lr)) == (Training(lr=1.0), float)
