"""Compares the megablocks backend with grouped_mm, through Triton's interpreter; run by test_backends.py. Exits with 1 on a
difference."""

from functools import partial

import torch

from spes_p2p.model.backends import GroupedMM, choose_backend
from spes_p2p.model.stored import Matrices


def main() -> None:
    torch.manual_seed(0)
    reference, backend = GroupedMM(), choose_backend("megablocks", torch.device("cpu"), 128, 128)
    for ends in ([3, 3, 140], [0, 130, 130]):
        weights = Matrices(torch.randn(3, 256, 128))
        x, g = torch.randn(ends[-1], 128), torch.randn(ends[-1], 256)
        where = torch.tensor(ends, dtype=torch.int32)
        for name, arguments in {
            "outputs": (x, weights, where), "input_gradient": (g, weights, where), "weight_gradients": (g, x, where),
        }.items():
            actual, expected = (getattr(b, name)(*arguments) for b in (backend, reference))
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3, msg=partial("{} {}: {}".format, name, ends))


if __name__ == "__main__":
    main()
