"""The endpoint in the driver's process, for the workers of a run, for tasks that read rows, or for a page."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from wsgiref.types import WSGIApplication

from sparkdl.data.array_blocks import ArrayBlocks
from sparkdl.errors import ClusterError
from sparkdl.server.group_coordinator import GroupCoordinator
from sparkdl.server.http_app import Traffic, add_rows, make_app, make_plain_app
from sparkdl.server.http_server import serve
from sparkdl.server.monitoring.metrics import TOKEN_SETTING, metrics_token
from sparkdl.server.monitoring.overview import Overview
from sparkdl.server.monitoring.page import VIEWERS, Page
from sparkdl.settings import Network, parse_port
from sparkdl.sources.base import Source
from sparkdl.spark.application import SparkApplication
from sparkdl.spark.jobs import StageFactory
from sparkdl.transport import tls
from sparkdl.transport.exchange import Endpoint

logger = logging.getLogger(__name__)
READERS = 8  # the number of tasks for which an endpoint that only serves rows has threads
NO_RUN = bytes(16)


@contextmanager
def serving(
    coordinator: GroupCoordinator,
    cluster: SparkApplication,
    network: Network,
    traffic: Traffic,
    *,
    page: Page | None = None,
    rows: ArrayBlocks | None = None,
) -> Iterator[Endpoint]:
    """Serve a coordinator to workers in a ``with`` block, and close it at the end; yield the endpoint.

    Args:
        coordinator: the coordinator of the run.
        cluster: the Spark application.
        network: the settings of the endpoint.
        traffic: the counts of requests to the endpoint.
        page: the live page of the run, if there is one.
        rows: the rows that workers get from the endpoint, if there are any.
    """
    token = secrets.token_urlsafe(32)
    metrics = metrics_token(cluster.setting(TOKEN_SETTING))
    app = make_app(coordinator, token, traffic, metrics_token=metrics, page=page, rows=rows)
    shape = coordinator.shape
    with _listening(app, token, cluster, network, shape.num_workers, run=shape.run, page=page) as endpoint:
        try:
            yield endpoint
        finally:
            coordinator.close()  # before the server stops, so that no request keeps it waiting


@contextmanager
def serving_rows(
    source: Source, cluster: SparkApplication, network: Network, stages: StageFactory, batch_size: int
) -> Iterator[StageFactory]:
    """Serve the rows of a source to the tasks of a job in a ``with`` block, if it has rows to serve.

    Without an endpoint, for example because the only port is in use, the rows travel in the tasks.

    Args:
        source: the rows of the job.
        cluster: the Spark application.
        network: the settings of the endpoint.
        stages: the stage factory of the job.
        batch_size: rows per forward pass.

    Yields:
        The stage factory of the job, with the endpoint if there is one.
    """
    with ExitStack() as stack:
        rows = source.rows_to_serve(cluster, batch_size)
        if rows is not None:
            token = secrets.token_urlsafe(32)
            try:
                app = make_plain_app(token, partial(add_rows, rows=rows))
                endpoint = stack.enter_context(_listening(app, token, cluster, network, READERS))
            except ClusterError as error:
                logger.debug("No endpoint serves the rows: %s", error)
            else:
                source.served, stages = rows, replace(stages, endpoint=endpoint)
        yield stages


@contextmanager
def shown(
    record: Overview, cluster: SparkApplication, network: Network, note: Callable[[str], object]
) -> Iterator[None]:
    """Serve a page about several fits in a ``with`` block, and print a link to it.

    Without an endpoint, for example because the only port is in use, a warning is logged.

    Args:
        record: the record that the page shows.
        cluster: the Spark application.
        network: the settings of the endpoint.
        note: prints a line.
    """
    page, token = Page(record, secrets.token_bytes(16)), secrets.token_urlsafe(32)
    with ExitStack() as stack:
        app = make_plain_app(token, page.add_to)
        try:
            endpoint = stack.enter_context(_listening(app, token, cluster, network, 1, page=page))
        except ClusterError as error:
            logger.warning("There is no live page: %s", error)
        else:
            note(f"Live page: {endpoint.url}{page.link()} (works once)")
        yield


@contextmanager
def _listening(
    app: WSGIApplication,
    token: str,
    cluster: SparkApplication,
    network: Network,
    num_workers: int,
    *,
    run: bytes = NO_RUN,
    page: Page | None = None,
) -> Iterator[Endpoint]:
    """Serve an app in a ``with`` block, at the address in the settings; yield the endpoint."""
    listen, host = cluster.addresses(network.bind_address, network.advertised_host)
    port = parse_port("spark.sparkdl.port", network.port or cluster.setting("spark.sparkdl.port", "0"))
    context, certificate = None, b""
    if tls.is_wanted(network.tls, cluster):
        context, certificate = tls.server_context()
        logger.info("Workers and the endpoint use TLS 1.3.")
    viewers = 0
    if page is not None:
        page.encrypted, viewers = context is not None, VIEWERS
    with serve(app, listen, port, num_workers, context, num_viewers=viewers) as bound:
        yield Endpoint(host, bound, token, run, certificate)
