"""Row gradients in somebody's own loop: scalers, half precision, compilers, mistakes, and the end."""

import copy
import gc
import weakref

import pytest
import torch
from capabilities import needs_cuda
from contract.model_checks import make_batch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import NoTableError, TableError, TrainingError, UnsupportedTableError
from rarebit.models.deepfm import DeepFM
from rarebit.row_gradients.seam import RowGradients, sum_losses


class Net(nn.Module):
    """A table and a bag, then a network."""

    def __init__(self, **options):
        super().__init__()
        self.user = nn.Embedding(12, 6, **options)
        self.tags = nn.EmbeddingBag(9, 6, mode="sum", padding_idx=0)
        self.out = nn.Linear(6, 1)

    def forward(self, user, tags):
        return self.out(torch.tanh(self.user(user) + self.tags(tags))).squeeze(-1)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(12, 6)
        self.out = nn.Linear(6, 12, bias=False)
        self.out.weight = self.user.weight

    def forward(self, user, tags):
        return self.out(self.user(user))


def unit_rows(ids, gradients):
    total = gradients.sum(dim=0)
    return total / total.norm(dim=1, keepdim=True).clamp(min=1e-12)


def batch(rows=30):
    return torch.randint(12, (rows,)), torch.randint(9, (rows, 3))


def loss_of(model, args):
    return F.softplus(model(*args).float()).mean()


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def train(model, batches, rule=unit_rows):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RowGradients(model, rule) as rows:
        for args in batches:
            optimizer.zero_grad()
            rows.backward(loss_of(model, args))
            optimizer.step()


@pytest.mark.parametrize("model", [Net(), Tied()], ids=["lookups", "tied"])
def test_a_rule_sees_unscaled_gradients_and_the_scaler_takes_the_answer(model):
    args, seen = batch(), []
    plain, scaler = copy.deepcopy(model), torch.amp.GradScaler("cpu")

    def rule(ids, gradients):
        seen.append(gradients.clone())
        return unit_rows(ids, gradients)

    for net, options in ((plain, {}), (model, {"scaler": scaler})):
        with RowGradients(net, rule) as rows:
            rows.backward(loss_of(net, args), **options)
    half = len(seen) // 2
    assert all(map(torch.equal, seen[:half], seen[half:]))  # the scale is a power of two
    for name, gradient in gradients_of(plain).items():
        assert_close(gradients_of(model)[name], gradient * 65536.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.user.weight.detach().clone()
    scaler.step(optimizer)
    assert_close(model.user.weight, before - plain.user.weight.grad)


@pytest.mark.parametrize("model", [Net(), Tied()], ids=["lookups", "tied"])
def test_a_rule_cannot_hide_an_overflow_from_the_scaler(model):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = copy.deepcopy(model.state_dict())
    with RowGradients(model, lambda i, g: torch.zeros_like(g[0])) as rows:
        rows.backward(1e4 * model.user(torch.tensor([3, 4])).sum(), scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**126
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_rule_sees_float32_in_a_bfloat16_model():
    model, args, seen = Net().bfloat16(), batch(), []
    exact = copy.deepcopy(model).float()
    for net in (model, exact):
        with RowGradients(net, lambda i, g: seen.append(g) or unit_rows(i, g)) as rows:
            rows.backward(loss_of(net, args))
    assert {gradient.dtype for gradient in seen} == {torch.float32}
    for name, gradient in gradients_of(exact).items():
        assert gradients_of(model)[name].dtype == torch.bfloat16
        # bfloat16 keeps 8 bits: each gradient of a lookup is within 2^-8, their sums a little more
        error = (gradients_of(model)[name].float() - gradient).norm()
        assert error < 0.03 * gradient.norm()


def test_the_sum_rule_is_plain_backward_under_autocast():
    model = DeepFM(make_batch().schema, dim=4, hidden=(8,))
    data, plain = make_batch(), copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(plain, (data,)).backward()
        with RowGradients(model, lambda i, g: (g.mT @ g).sum() * 0 + g[0]) as rows:
            rows.backward(loss_of(model, (data,)))
    for name, gradient in gradients_of(plain).items():
        assert torch.equal(gradients_of(model)[name], gradient), name


# torch hides this warning of its compiler itself, which it cannot where warnings are errors
COMPILES = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def check_compiled(backend):
    model, batches = Net(), [batch() for _ in range(3)]
    eager = copy.deepcopy(model)
    train(eager, batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = RowGradients(model, unit_rows)
    compiled = torch.compile(model, backend=backend)
    for args in batches:
        optimizer.zero_grad()
        rows.backward(loss_of(compiled, args))
        optimizer.step()
    for name, value in eager.state_dict().items():
        assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    rows.close()
    optimizer.zero_grad()
    loss_of(compiled, batches[0]).backward()
    assert model.user.weight.grad.any()
    assert model.tags.weight.grad.any()


@COMPILES
def test_a_compiled_model_trains_as_an_eager_one():
    check_compiled("aot_eager")


TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
"""How far the sum rule may be from plain `backward`, relative to the norm of the gradient."""


def assert_same_gradients(model, plain, dtype):
    expected = gradients_of(plain)
    # of all parameters: the gradient of a bias may be a small rest of large sums
    scale = max(gradient.norm() for gradient in expected.values())
    for name, gradient in expected.items():
        error = (gradients_of(model)[name] - gradient).norm()
        assert error <= TOLERANCE[dtype] * scale, name


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("model", [Net(), Tied()], ids=["lookups", "tied"])
def test_the_sum_rule_over_micro_batches_is_plain_accumulation(model, dtype):
    model = copy.deepcopy(model).to(dtype)
    plain, parts = copy.deepcopy(model), [batch() for _ in range(3)]
    for args in parts:
        (F.softplus(plain(*args)).mean() / 3).backward()
    with RowGradients(model, sum_losses) as rows:
        for number, args in enumerate(parts):
            rows.backward(F.softplus(model(*args)).mean() / 3, last=number == 2)
    assert_same_gradients(model, plain, dtype)


@COMPILES
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_sum_rule_in_a_compiled_model_is_plain_backward(dtype):
    model, args = Net().to(dtype), batch()
    plain = copy.deepcopy(model)
    F.softplus(plain(*args)).mean().backward()
    with RowGradients(model, sum_losses) as rows:
        compiled = torch.compile(model, backend="aot_eager")
        rows.backward(F.softplus(compiled(*args)).mean())
    assert_same_gradients(model, plain, dtype)


@COMPILES
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor imports
@pytest.mark.slow
def test_a_model_compiled_by_inductor_trains_as_an_eager_one():
    check_compiled("inductor")


@pytest.mark.parametrize("model", [Net(), Tied()], ids=["lookups", "tied"])
def test_a_plain_backward_is_noticed_at_the_next_forward(model):
    args = batch()
    with RowGradients(model, sum_losses) as rows:
        loss_of(model, args).backward()
        with pytest.raises(TrainingError, match=r"call rows.backward\(loss\)"):
            model(*args)
        rows.backward(loss_of(model, args))
        loss_of(model, args).backward()
        with pytest.raises(TrainingError, match=r"call rows.backward\(loss\)"):
            rows.backward(torch.zeros((), requires_grad=True))


def test_a_plain_backward_before_the_end_is_noticed_at_the_end():
    model = Net()
    rows = RowGradients(model, sum_losses)
    loss_of(model, batch()).backward()
    with pytest.raises(TrainingError, match=r"call rows.backward\(loss\)"):
        rows.close()


def test_forwards_whose_output_is_dropped_are_no_mistake_and_leave_nothing():
    model, args = Net(), batch()
    with RowGradients(model, sum_losses) as rows:
        for _ in range(3):
            model(*args)
        gc.collect()
        assert not any(table.pending for table in rows._tables)
        output = model(*args)
        (lookup,) = rows._tables[0].pending.values()
        remembered = weakref.ref(lookup.rows)
        del lookup, output
        gc.collect()
        assert remembered() is None
        rows.backward(loss_of(model, args))
        gc.collect()
        assert not any(table.pending or table.step for table in rows._tables)


def test_forwards_without_gradients_are_left_alone():
    model, args = Net(), batch()
    expected = model(*args).detach()
    with RowGradients(model, sum_losses) as rows, torch.no_grad():
        assert torch.equal(model(*args), expected)
        assert not model.user(args[0]).requires_grad
        assert not any(table.pending for table in rows._tables)


def test_a_loss_without_rows_is_refused():
    model = Net()
    with RowGradients(model, sum_losses) as rows:
        with pytest.raises(TrainingError, match="depend on no row"):
            rows.backward(model.out.weight.sum())
        with pytest.raises(TrainingError, match="at least one loss"):
            rows.backward()
        with pytest.raises(TrainingError, match=r"rows.backward\(first, second\), got a list"):
            rows.backward([model.out.weight.sum()])


def test_arguments_in_the_wrong_order_are_refused():
    with pytest.raises(TrainingError, match=r"takes a rule, .* after the model; got a str"):
        RowGradients(Net(), "sum")
    with pytest.raises(UnsupportedTableError, match="must be a torch module, got a function"):
        RowGradients(sum_losses, Net())


def test_micro_batches_with_other_numbers_of_losses_are_refused():
    model, args = Net(), batch()
    with RowGradients(model, sum_losses) as rows:
        rows.backward(loss_of(model, args), last=False)
        loss = loss_of(model, args)
        with pytest.raises(TrainingError, match="got 2 after 1"):
            rows.backward(loss, loss)
        rows.backward(loss)


def test_losses_reach_parameters_outside_the_model():
    model, args, weight = Net(), batch(), torch.ones((), requires_grad=True)
    with RowGradients(model, sum_losses) as rows:
        loss = loss_of(model, args)
        rows.backward(loss, weight * loss)
    assert_close(weight.grad, loss.detach())


def test_closing_leaves_the_model_as_it_was():
    model, args = Net(), batch()
    plain, before = copy.deepcopy(model), {k: dict(m.__dict__) for k, m in model.named_modules()}
    rows = RowGradients(model, sum_losses)
    with pytest.raises(TableError, match="hooks"):
        rb.apply_(model, rb.Hashing(buckets=5), where=lambda t: t.kind == "bag", verbose=False)
    rows.backward(loss_of(model, args))
    rows.close()
    rows.close()
    for name, module in model.named_modules():
        assert set(module.__dict__) - set(before[name]) <= {"_ddp_params_and_buffers_to_ignore"}
        assert not module._forward_hooks
    assert all(not hasattr(parameter, "_ddp_ignored") for parameter in model.parameters())
    model.zero_grad()
    loss_of(model, args).backward()
    loss_of(plain, args).backward()
    for name, gradient in gradients_of(plain).items():
        assert torch.equal(gradients_of(model)[name], gradient)
    with pytest.raises(TrainingError, match="closed"):
        rows.backward(loss_of(model, args))
    rb.apply_(model, rb.Hashing(buckets=5), verbose=False)
    RowGradients(model, sum_losses).close()


def test_closing_in_the_middle_of_a_step_says_so():
    model = Net()
    rows = RowGradients(model, sum_losses)
    rows.backward(loss_of(model, batch()), last=False)
    with pytest.raises(TrainingError, match="last=True"):
        rows.close()


def stop_in_the_middle_of_a_step(model):
    with RowGradients(model, sum_losses) as rows:
        rows.backward(loss_of(model, batch()), last=False)
        raise ZeroDivisionError


def test_the_callers_error_is_not_hidden_by_the_end():
    model = Net()
    with pytest.raises(ZeroDivisionError):
        stop_in_the_middle_of_a_step(model)
    assert not model.user._forward_hooks


def test_a_table_has_row_gradients_once():
    model = Net()
    with RowGradients(model, sum_losses, where=lambda t: t.name == "user"):
        with pytest.raises(UnsupportedTableError, match="already"):
            RowGradients(model, sum_losses)
        with pytest.raises(UnsupportedTableError, match="already"):
            RowGradients(copy.copy(model), sum_losses)
    RowGradients(model, sum_losses).close()


def test_a_compiled_model_is_refused():
    with pytest.raises(UnsupportedTableError, match="is compiled"):
        RowGradients(torch.compile(Net(), backend="eager"), sum_losses)


def test_hooks_of_the_caller_stay():
    model, args = Net(), batch()
    model.user.register_forward_hook(lambda module, ids, rows: rows * 2)
    plain = copy.deepcopy(model)
    loss_of(plain, args).backward()
    with RowGradients(model, sum_losses) as rows:
        rows.backward(loss_of(model, args))
    assert torch.equal(model.user.weight.grad, plain.user.weight.grad)
    assert len(model.user._forward_hooks) == 1


def test_a_deep_copy_is_a_model_of_its_own():
    model, args = Net(), batch()
    with RowGradients(model, sum_losses):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.tags.weight.mul_(3.0)
        assert not torch.equal(other(*args), model(*args))
        loss_of(other, args).backward()
        assert other.user.weight.grad.any()
        assert other.tags.weight.grad.any()
        model(*args)


class Odd(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * 2


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (nn.Embedding(5, 2, max_norm=1.0), "max_norm"),
        (nn.Embedding(5, 2, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (Odd(5, 2), "subclass"),
    ],
    ids=["max_norm", "scale_grad_by_freq", "subclass"],
)
def test_tables_that_do_more_than_look_up_are_refused(table, words):
    with pytest.raises(UnsupportedTableError, match=words):
        RowGradients(nn.Sequential(table), sum_losses)


def test_a_model_without_a_table_to_watch_is_refused():
    model = nn.ModuleDict({"table": nn.Embedding(5, 2)})
    with pytest.raises(NoTableError, match=r"table \(not chosen\)"):
        RowGradients(model, sum_losses, where=lambda t: False)
    with pytest.raises(NoTableError, match=r"table \(frozen\)"):
        RowGradients(model.requires_grad_(False), sum_losses)
    with pytest.raises(NoTableError, match="and no nn"):
        RowGradients(nn.Linear(2, 2), sum_losses)


@needs_cuda
def test_the_gpu_gives_the_answer_of_the_cpu():
    model, batches = Net(), [batch() for _ in range(3)]
    other = copy.deepcopy(model).cuda()
    train(model, batches)
    train(other, [tuple(part.cuda() for part in args) for args in batches])
    for name, value in model.state_dict().items():
        assert_close(other.state_dict()[name].cpu(), value, rtol=1e-4, atol=1e-5)


class Breaks(torch.autograd.Function):
    """Its backward fails, as one that runs out of memory does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("out of memory")


def two_losses(model, args, last=lambda x: x):
    scores = model(*args)
    return last(scores).mean(), scores.square().mean()


@pytest.mark.parametrize("model", [Net(), Tied()], ids=["lookups", "tied"])
def test_a_step_that_failed_is_no_part_of_the_next(model):
    model = copy.deepcopy(model)
    plain, args = copy.deepcopy(model), batch()
    with RowGradients(model, sum_losses) as rows:
        with pytest.raises(RuntimeError, match="out of memory"):
            rows.backward(*two_losses(model, batch(), Breaks.apply))
        model.zero_grad()
        rows.backward(*two_losses(model, args))
    sum(two_losses(plain, args)).backward()
    assert_same_gradients(model, plain, torch.float32)


def test_micro_batches_can_be_discarded():
    model, args = Net(), batch()
    plain = copy.deepcopy(model)
    with RowGradients(model, sum_losses) as rows:
        rows.backward(*two_losses(model, batch()), last=False)
        rows.discard()
        model.zero_grad()
        rows.backward(loss_of(model, args))
    loss_of(plain, args).backward()
    assert_same_gradients(model, plain, torch.float32)
