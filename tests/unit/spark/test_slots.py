"""The number of workers follows from the slots of an application."""

import pytest

from sparkdl.errors import ClusterError
from sparkdl.spark.slots import Slots, wait_of


class Application:
    """An application with given settings and slots."""

    local, dynamic, separate_gpus = True, False, 0

    def __init__(self, found=2, **settings):
        self.found, self.settings = found, {f"spark.{name}": value for name, value in settings.items()}
        self.dynamic = self.setting("spark.dynamicAllocation.enabled") == "true"

    def setting(self, name, default=""):
        return self.settings.get(name, default)

    def slots(self):
        return self.found

    def age(self):
        return 0.0


@pytest.mark.parametrize(
    ("settings", "gpus", "cores", "tasks", "requested"),
    [
        ({"master": "local[4]"}, 0, 1, 1, 0),
        ({"master": "local-cluster[3, 2, 1024]"}, 0, 2, 2, 6),
        ({"master": "spark://host:7077", "cores.max": "8", "executor.cores": "2"}, 0, 2, 2, 8),
        ({"master": "spark://host:7077", "cores.max": "8"}, 0, 8, 8, 8),
        ({"master": "yarn", "executor.cores": "4", "executor.instances": "3"}, 0, 4, 4, 12),
        ({"master": "yarn", "executor.cores": "4", "executor.instances": "3", "task.cpus": "2"}, 0, 4, 2, 6),
        ({"master": "yarn", "executor.cores": "8", "executor.instances": "3"}, 2, 8, 2, 6),
    ],
)
def test_an_application_asks_for_the_slots_that_its_settings_name(settings, gpus, cores, tasks, requested):
    """The number of slots follows from the settings; standalone executors take all cores by default."""
    application = Application(**settings)
    application.separate_gpus = gpus
    slots = Slots(application)

    assert (cores, tasks, requested) == (slots.executor_cores(), slots.per_executor(), slots.requested())


@pytest.mark.parametrize(
    ("wanted", "most", "expected"),
    [
        (None, None, (2, "one per slot")),
        (None, 1, (1, "one per row of a batch")),
        (2, 1, (2, "as requested")),
    ],
)
def test_the_number_of_workers_comes_with_its_reason(wanted, most, expected):
    """A number that the user asks for is taken as it is; otherwise there is one worker per slot."""
    assert expected == Slots(Application()).num_workers(wanted, most, timeout=0.0)


def test_more_workers_than_slots_are_refused():
    """More workers than slots are refused, or with dynamic allocation, more than its maximum."""
    with pytest.raises(
        ClusterError, match="needs 3 slots; the application has 2 .* Use num_workers=2 or less, or"
    ):
        Slots(Application()).num_workers(3, None, timeout=0.0)
    with pytest.raises(
        ClusterError, match=r"num_workers=1 needs 1 slot; the application has 0 .*\. Start executors"
    ):
        Slots(Application(found=0)).num_workers(None, None, timeout=0.0)
    growing = Application(
        **{"dynamicAllocation.enabled": "true", "dynamicAllocation.maxExecutors": "2", "executor.cores": "2"}
    )
    assert (4, "as requested") == Slots(growing).num_workers(4, None, timeout=0.0)
    with pytest.raises(ClusterError, match="num_workers=5 needs 5 slots; the application has 4"):
        Slots(growing).num_workers(5, None, timeout=0.0)


@pytest.mark.parametrize(
    ("settings", "limit"), [({}, 0), ({"cores.max": "8"}, 16), ({"executor.cores": "4"}, 8)]
)
def test_a_standalone_executor_may_have_more_slots_than_one(settings, limit):
    """With dynamic allocation, standalone executors without executor.cores take all cores by default."""
    maximum = {"dynamicAllocation.enabled": "true", "dynamicAllocation.maxExecutors": "2"}
    slots = Slots(Application(master="spark://host:7077", **maximum, **settings))

    assert limit == slots.most()
    assert (8, "as requested") == slots.num_workers(8, None, timeout=0.0)


@pytest.mark.parametrize(
    ("stages", "others", "running", "reason"),
    [
        ([], [], 0, "Spark is planning their job"),
        ([(False, 4), (False, 2)], [], 0, "Spark is planning their job"),
        ([(True, 4), (False, 2)], [], 2, "Spark is computing and distributing the rows"),
        ([(True, 4), (True, 2)], [7, 9], 2, "other jobs may occupy the slots (job 7, 9)"),
        ([(True, 2)], [], 1, "executors are starting, or have no free slots"),
        ([(True, 2)], [], 2, "they are importing Keras"),
    ],
)
def test_the_reason_of_a_wait_is_found_from_the_tasks(stages, others, running, reason):
    """The reason for a wait follows from the stages of the job, the other jobs and the running tasks."""
    found = wait_of(stages, others, running)

    assert reason == found.reason
    assert found.for_slots == ("slots" in reason)
