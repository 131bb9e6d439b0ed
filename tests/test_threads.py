"""Results come in the order of the items, a few of which are read ahead."""

import threading
from contextlib import closing
from itertools import count

import pytest

from hf_refspec.threads import map_in_order


@pytest.mark.parametrize("threads", [1, 3])
def test_results_are_in_order_and_few_items_are_read_ahead(threads):
    before, read = {*threading.enumerate()}, []

    def items():
        for item in count():
            read.append(item)
            yield item

    with closing(map_in_order(lambda item: item**2, items(), threads)) as results:
        for i in range(50):
            assert next(results) == i**2
            assert len(read) <= i + 2 + 2 * threads
    assert {*threading.enumerate()} <= before


def test_a_failed_item_raises_its_error_where_its_result_would_be():
    results = map_in_order(lambda item: 1 // item, [1, 1, 0, 1], 2)
    assert [next(results), next(results)] == [1, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
