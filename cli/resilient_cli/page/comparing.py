"""The page of ``resilient ckpt diff --html``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient_cli.page.compared import comparison
from resilient_cli.page.html import View, whole_page
from resilient_cli.page.pictures import pictures_of_both
from resilient_cli.page.tables import text

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.comparison.values import Comparison


def comparison_page(found: Comparison, told: Callable[[int, int], None]) -> str:
    """Return the page of two checkpoints, whole: it refers to nothing.

    Args:
        found: the comparison.
        told: called with how many pictures are drawn, and how many there will be.
    """
    pictures = pictures_of_both(found, told)
    name = f"{found.before.name} and {found.after.name}"
    said = f"A is {text(found.before.url)}, B is {text(found.after.url)}"
    body = comparison(found, pictures)
    return whole_page(name, said, [View("compare", "Two checkpoints side by side", body)])
