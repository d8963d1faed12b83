"""Functions that are recorded once they are known, by a recorder that runs on any device."""

import pytest
import torch
from capabilities import needs_cuda
from replaying import Recorder

from rarebit.row_gradients.recorded import WARM_UP, Recorded, record_graph


def double(inputs):
    return 2 * inputs[0], inputs[0] + inputs[1]


def inputs_of(size=3):
    return [torch.randn(size), torch.randn(size)]


def call(recorded, key="key", size=3, function=double):
    inputs = inputs_of(size)
    found = recorded(key, function, inputs)
    for result, expected in zip(found, function(inputs), strict=True):
        assert torch.equal(result, expected)
    return found


def test_alike_calls_are_recorded_and_replayed_with_the_inputs_of_each_call():
    recorder = Recorder()
    recorded = Recorded(recorder)
    for _ in range(WARM_UP):
        call(recorded)
    assert recorder.made == 0
    for _ in range(4):
        call(recorded)
    assert (recorder.made, recorder.replays) == (1, 4)


def test_a_result_stays_what_it_is_after_the_next_replay():
    recorded = Recorded(Recorder())
    for _ in range(WARM_UP):
        call(recorded)
    first = call(recorded)
    kept = [result.clone() for result in first]
    call(recorded)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_an_odd_call_is_run_as_it_is_and_leaves_the_recording():
    recorder = Recorder()
    recorded = Recorded(recorder)
    for _ in range(WARM_UP + 1):
        call(recorded)
    call(recorded, size=2)
    call(recorded, key="other", function=lambda inputs: (inputs[0] - 1,))
    call(recorded)
    assert (recorder.made, recorder.replays) == (1, 2)


def test_what_comes_again_and_again_is_recorded_in_place_of_the_first():
    recorder = Recorder()
    recorded = Recorded(recorder)
    for size in (3, 2):
        for _ in range(WARM_UP + 2):
            call(recorded, size=size)
    assert (recorder.made, recorder.replays) == (2, 4)


def test_a_recording_that_was_given_up_is_made_again():
    recorder = Recorder()
    recorded = Recorded(recorder)
    for _ in range(WARM_UP + 1):
        call(recorded)
    recorded.forget()
    for _ in range(WARM_UP):
        call(recorded)
    assert recorder.made == 1
    call(recorded)
    assert recorder.made == 2


def test_what_cannot_be_recorded_is_run_as_it_is():
    asked = []

    def refuse(function, inputs):
        asked.append(inputs)
        raise RuntimeError("operation not permitted when stream is capturing")

    recorded = Recorded(refuse)
    for _ in range(WARM_UP + 3):
        call(recorded)
    assert len(asked) == 1
    assert recorded.recording is None


def test_nothing_is_recorded_on_the_cpu():
    recorded = Recorded()
    for _ in range(WARM_UP + 2):
        call(recorded)
    assert recorded.recording is None


@needs_cuda
def test_a_graph_computes_nothing_before_its_first_replay():
    total = torch.zeros(3, device="cuda")

    def add(inputs):
        total.add_(inputs[0])
        return (total * 2,)

    place = torch.ones(3, device="cuda")
    add([place])
    replay = record_graph(add, [place])
    assert total.tolist() == [1.0] * 3
    place.fill_(4.0)
    assert replay()[0].tolist() == [10.0] * 3


@needs_cuda
def test_a_call_that_waits_for_the_device_cannot_be_recorded_and_random_numbers_can_be_drawn_after():
    place = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError):
        record_graph(lambda inputs: (inputs[0] * inputs[0].sum().item(),), [place])
    assert torch.rand(3, device="cuda").isfinite().all()
