"""Code of the program between the sum of gradients and the update: noise, surgery, logging.

It sees the mean gradients of the whole global batch, once a step, on every worker: all have the
same and change them alike, so an exchange whose workers each have all sums carries them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from unisono.forbidden import IN_AN_UPDATE, forbid

OnGradients = Callable[[int, dict[str, torch.Tensor]], Any]


class GradientHook:
    """Calls a program's function of the gradients. Final.

    Args:
        function: takes (step, gradients by name), changes them in place or returns others by name.
        names: of the parameters that the optimizer updates.
    """

    def __init__(self, function: OnGradients, names: Sequence[str]) -> None:
        self._function, self._names = function, names

    def call(self, step: int, sums: Sequence[torch.Tensor], present: Sequence[bool]) -> None:
        """Call it.

        Args:
            step: counted over the whole run.
            sums: the mean gradients, which are changed.
            present: for each parameter, whether it has a gradient in this step.

        Raises:
            TypeError: it returns something else than gradients by name.
            ValueError: one does not fit its parameter.
        """
        named = zip(self._names, sums, present, strict=True)
        gradients = {name: total for name, total, is_there in named if is_there}
        before = forbid(IN_AN_UPDATE)
        try:
            with torch.no_grad():
                returned = self._function(step, dict(gradients))
                if returned is not None:
                    self._take(gradients, returned)
        finally:
            forbid(before)

    def _take(self, gradients: Mapping[str, torch.Tensor], returned: Any) -> None:
        if not isinstance(returned, Mapping):
            raise TypeError(
                f"`on_gradients` must return None or gradients by name, but returned a "
                f"{type(returned).__name__}: change tensors in place, or return a dict of those "
                f"that are to take their place."
            )
        for name, gradient in returned.items():
            if name not in gradients:
                raise ValueError(
                    f"`on_gradients` must return gradients by the names that it is given, but "
                    f"returned {name!r}, which is none of the {len(gradients)}."
                )
            total = gradients[name]
            if not isinstance(gradient, torch.Tensor) or gradient.shape != total.shape:
                seen = getattr(gradient, "shape", type(gradient).__name__)
                raise ValueError(
                    f"`on_gradients` must return gradients of their parameters' shapes, but "
                    f"returned {seen!s} for {name!r}, whose shape is {tuple(total.shape)}."
                )
            if gradient is not total:
                total.copy_(gradient)
