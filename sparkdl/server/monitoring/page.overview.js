// A page about several fits: a table of them, and one curve for each.
const STATES = {
  running: "Running", finished: "Finished", stopped: "Stopped", failed: "Failed",
};

function showProgress() {
  const stopping = run.state === "running" && run.stop_request;
  showState(run.name, stopping ? "Stopping" : STATES[run.state] || "");
  find("bar").value = run.of ? run.done / run.of : 0;
  const done = `${number(run.done)} of ${number(run.of)} ${run.kind} have ended`;
  find("progress").textContent = `${done} · ${duration(run.seconds)} since the start`;
  showFacts(run.facts);
}

function showRows() {
  find("rows-title").textContent = run.kind[0].toUpperCase() + run.kind.slice(1);
  const cell = (value) => (typeof value === "number" || value === null ? number(value) : value);
  fillTable(find("rows"), run.columns, run.rows.map((row) => row.map(cell)));
}

function redraw() {
  find("curves").hidden = !run.curves.length;
  if (!run.curves.length || !window.Plotly) return;
  const title = `${run.metric} by epoch`;
  const traces = run.curves.map(({ name, values, best, running }) => ({
    name, mode: values.length > 1 ? "lines" : "markers", x: values.map((_, index) => index + 1), y: values,
    line: { width: best ? 3 : 1.5, dash: running ? "dot" : "solid" },
  }));
  draw(placeOf(find("chart-place"), "chart-curves"), title, traces,
    { title: { text: title, font: { size: 14 } }, showlegend: true });
}

function take(values) {
  const { events } = values;
  if (values.whole) find("events").replaceChildren();
  Object.assign(run, values);
  document.querySelectorAll("[data-stop]").forEach((button) => { button.hidden = !run.stops; });
  showProgress();
  showRows();
  showEvents(events);
  redraw();
  showButtons(run.state === "running");
}

start();
