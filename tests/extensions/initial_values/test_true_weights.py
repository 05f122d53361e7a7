"""Initial values of parameters that hold something else than their true weights."""

from __future__ import annotations

from tests.runtime.test_true_weights import compiled, made, of, same


def test_parameters_that_are_reset_have_these_values_as_true_weights_too() -> None:
    model, data = made(3)
    with compiled(model, of("spectrain"), "1f1b") as pipe:
        for x, y in data:
            pipe.step(x, target=y)
        trained = {n: t.clone() for n, t in pipe.state_dict().items()}
        pipe.reset_parameters()
        reset = pipe.state_dict()
        assert not any(t.equal(trained[n]) for n, t in reset.items())
        assert same(dict(pipe.named_parameters()), reset)
