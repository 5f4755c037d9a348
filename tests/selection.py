"""The sample of the tests that `make test` runs, and the kind of master of each.

A test's choice depends on its own name and parameters alone: a new test changes no other test's master, and
all days and processes choose alike.
"""

from zlib import crc32


def masters_of(item):
    """Return the kinds of masters that a test is for."""
    kinds = getattr(item.module, "MASTERS", ("local",))
    without = {
        kind for kind, mark in (("connect", "classic"), ("local", "apart")) if item.get_closest_marker(mark)
    }
    return tuple(kind for kind in kinds if kind not in without)


def is_in_sample(item, values):
    """Return True if `make test` runs a case of a test.

    ``values`` is an empty dict at first; it keeps the values of each test's parameters in order.
    """
    if item.get_closest_marker("whole"):
        return False
    one_case, turns = item.get_closest_marker("one_case"), takes_turns(item)
    if not (one_case or turns) or not hasattr(item, "callspec"):
        return True
    places = {name: place_of(item, name, values) for name in item.callspec.params}
    if one_case and any(place for name, place in places.items() if name != "spark"):
        return False
    return not turns or has_its_turn(item, sum(places.values()))


def takes_turns(item):
    """Return True if each case of a test runs on one of several kinds of masters."""
    several = "spark" in item.fixturenames and len(masters_of(item)) > 1
    return several and not item.get_closest_marker("each_master")


def place_of(item, name, values):
    """Return the place of a parameter's value among those of the test's cases so far."""
    known, value = values.setdefault((item.path, item.originalname, name), []), item.callspec.params[name]
    if value not in known:
        known.append(value)
    return known.index(value)


def has_its_turn(item, place):
    """Return True if a case runs on its kind of master.

    The test's name chooses the kind for its first case; other cases take turns. Two parameters of three
    values meet three kinds in pairs; fewer values do not meet every kind.

    Args:
        item: the case.
        place: the sum of the places of its values, that of its kind of master included.
    """
    return (crc32(item.originalname.encode()) + place) % len(masters_of(item)) == 0
