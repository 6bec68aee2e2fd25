"""What constraints cost, and what forced text saves: tokens per second with a constraint over those without."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from bench.client import Server, alternate, at_once
from bench.measure import Measure, Size

__all__ = ["constraint"]

_fresh = itertools.count(int(time.time()))
_ANYTHING = {"guided_regex": r"(.|\n)*"}
"""Every mask is computed and applied, and the text is the same as without."""
_CHOICES = {
    "customer_delivery_address_country": ["Federal Republic of Germany", "Kingdom of the Netherlands"],
    "preferred_payment_method": ["bank transfer in advance", "credit card with verification"],
    "estimated_time_of_departure": ["within the next two business days", "on the following Monday"],
    "warehouse_responsible_for_shipping": ["northern distribution centre", "southern distribution centre"],
    "insurance_against_loss_and_damage": ["included without surcharge", "excluded upon request"],
}
_ORDER = {
    "type": "object",
    "properties": {name: {"enum": choices} for name, choices in _CHOICES.items()},
    "required": list(_CHOICES),
    "additionalProperties": False,
}


def constraint(servers: Sequence[Server], size: Size) -> Iterator[Measure]:
    """Decode with a constraint that allows everything, and with one that forces most of the text."""
    able = [server for server in servers if server.supports("guided_regex", "x")]

    def rate(num: int, fields: Mapping[str, Any], server: Server) -> float:
        prompts = [f"Log {next(_fresh)}. On the first day of the voyage, the crew of the" for _ in range(num)]
        start = time.perf_counter()
        answers = at_once([partial(server.stream, text, size.tokens, **fields) for text in prompts])
        return sum(answer.num_tokens for answer in answers) / (time.perf_counter() - start)

    def masked(num: int, server: Server, _: int) -> float:
        return rate(num, _ANYTHING, server) / rate(num, {}, server)

    def forced(server: Server, _: int) -> float:
        """With scores, forced text is decoded token by token."""

        def seconds(**fields: Any) -> float:
            prompt = f"Order {next(_fresh)} as JSON:\n"
            return server.complete(prompt, 8 * size.tokens, guided_json=_ORDER, **fields).total_s

        return seconds(logprobs=0) / seconds()

    for num in (min(size.streams), max(size.streams)):
        samples = alternate(able, size.repeats, partial(masked, num))
        yield Measure("constraint", f"{num} stream{'s' * (num > 1)}, masked over free decode", "x", samples)
    yield Measure("constraint", "schema, speed by forced text", "x", alternate(able, size.repeats, forced))
