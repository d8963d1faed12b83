"""A recorder for any device: what it records is run again on the same tensors, into the same memory."""


class Recorder:
    """Records as a CUDA graph does: nothing is computed before the first replay."""

    def __init__(self):
        self.made, self.replays = 0, 0

    def __call__(self, function, inputs):
        self.made += 1
        memory = []

        def replay():
            self.replays += 1
            results = function(inputs)
            if not memory:
                memory.extend(result.clone() for result in results)
            for place, result in zip(memory, results, strict=True):
                place.copy_(result)
            return tuple(memory)

        return replay
