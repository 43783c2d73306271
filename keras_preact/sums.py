"""The sums of a graph, each written as a shortcut plus a residual."""

from collections.abc import Iterator, Mapping, Sequence

from keras_preact.paths import Paths


def grouped(graph: Paths) -> list[tuple[int, tuple[int, ...]]]:
    """Return the numbers of the steps of a graph in a new order, each with the tensors that it
    should read, so that a sum of several terms is a shortcut plus a residual: `(x + a) + b`,
    with weights in a and b, becomes `x + (a + b)`. Empty if every sum is as it should be.

    The shortcut is the sum of the terms without weights. If all terms have some and the
    shape changes, it is the term that changes the start least. Other sums stay as they are,
    such as those of residual streams.
    """
    adds = {step.outputs[0]: i for i, step in enumerate(graph.steps) if graph.is_sum(step)}
    numbers = set(adds.values())
    only_added = {
        total: i
        for total, i in adds.items()
        if total not in graph.outputs
        and len(readers := graph.consumers[total]) == 1
        and readers[0] in numbers
    }
    changed: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    for total in adds.keys() - only_added.keys() if only_added else ():
        sides = [_parts(graph, tensor, only_added) for tensor in graph.steps[adds[total]].inputs]
        terms = [term for _, side in sides for term in side]
        shortcut = _shortcut(graph, total, terms)
        if shortcut in ([], terms) or any(shortcut == side for _, side in sides):
            continue
        residual = [term for term in terms if term not in shortcut]
        inside = sorted(i for parts, _ in sides for i in parts)
        changed |= {i: [] for i in inside}
        changed[adds[total]] = list(_written(graph, [*inside, adds[total]], shortcut, residual))
    if not changed:
        return []
    return [new for i, step in enumerate(graph.steps) for new in changed.get(i, [(i, step.inputs)])]


def _parts(graph: Paths, tensor: int, only_added: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """Return the sums inside a term of a sum, and the terms of all of them, in order."""
    sums, terms, waiting = [], [], [tensor]
    while waiting:
        tensor = waiting.pop()
        if tensor in only_added:
            sums.append(only_added[tensor])
            waiting += graph.steps[sums[-1]].inputs[::-1]
        else:
            terms.append(tensor)
    return sums, terms


def _shortcut(graph: Paths, total: int, terms: Sequence[int]) -> list[int]:
    """Return the terms of a sum that are its shortcut, none if it is not clear."""
    start, paths = graph.parting(terms) if len(terms) > 2 else (None, [])
    if start is None:
        return []
    without_weights = [term for term, steps in paths if not graph.weights_of(steps)]
    changes_shape = graph.specs[start].shape[1:] != graph.specs[total].shape[1:]
    if without_weights or not changes_shape:
        return [term for term in terms if term in without_weights]
    return [paths[0][0]]


def _written(
    graph: Paths, sums: Sequence[int], shortcut: Sequence[int], residual: Sequence[int]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield sums with other terms: those of both sides, then the sum of the sides."""
    numbers = iter(sums)
    ends = []
    for end, *others in (shortcut, residual):
        for term in others:
            number = next(numbers)
            yield number, (end, term)
            [end] = graph.steps[number].outputs
        ends.append(end)
    yield next(numbers), (*ends,)
