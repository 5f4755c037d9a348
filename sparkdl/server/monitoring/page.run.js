const TIMES = settings.activities;
const SETTLED_SECONDS = 10;  // of the first epoch, before the time left is shown: the model is compiled first
const FEWEST_POINTS = 3;  // of an epoch whose results within it are drawn
const STATES = {
  starting: "Starting", training: "Training", finished: "Finished", stopped: "Stopped", failed: "Failed",
};
const ABOUT = {
  mode: "Mode", frequency: "Frequency", merge: "Merge", workers: "Workers", batch_size: "Batch size",
  epochs: "Epochs", parameters: "Parameters", backend: "Backend", started: "Started",
  snapshot: "Last snapshot", exchanges: "Exchanges", retries: "Retries", late_dropped: "Late updates dropped",
  late_merged: "Late updates merged", not_finite: "Updates with NaN, Inf or huge values", lost: "Workers lost",
  returned: "Workers back",
};

// The rows per second over the last epochs and the present one, or over the whole run when it is over. The first
// seconds of an epoch alone would tell little, and the first epoch includes the compilation of the model.
function speedOfRun() {
  const { progress } = run;
  const parts = run.epochs.slice(isOver() ? 0 : Math.max(1, run.epochs.length - 3));
  if (!parts.length) parts.push(...run.epochs);
  if (!parts.length || parts.at(-1).epoch < progress.epoch + 1) parts.push(progress);
  const sum = (name) => parts.reduce((total, part) => total + (part[name] || 0), 0);
  return sum("seconds") ? sum("rows") / sum("seconds") : 0;
}

function showProgress() {
  const { progress, about } = run;
  const stopping = run.state === "training" && run.stop_request;
  showState(about.model, stopping ? "Stopping" : STATES[run.state] || "");
  const share = progress.total ? Math.min(1, progress.rows / progress.total) : 0;
  const epochs = about.epochs || 1;
  const done = Math.min(1, (progress.epoch + share - about.first_epoch) / (epochs - about.first_epoch));
  const bar = find("bar");
  if (run.state === "starting") bar.removeAttribute("value"); else bar.value = done;
  const parts = [`Epoch ${progress.epoch + 1} of ${epochs}`];
  if (run.state === "starting" && progress.waiting) parts.push(progress.waiting);
  if (progress.total) parts.push(`${number(progress.rows)} of ${number(progress.total)} rows`);
  const speed = speedOfRun();
  if (speed) parts.push(`${number(Math.round(speed))} rows/s`);
  const known = run.epochs.length || progress.seconds >= SETTLED_SECONDS;
  if (run.state === "training" && speed && progress.total && known) {
    const left = (epochs - progress.epoch) * progress.total - progress.rows;
    parts.push(`${duration(left / speed)} left`);
  }
  parts.push(`${duration(run.seconds)} since the start`);
  find("progress").textContent = parts.join(" · ");
  const facts = { ...about, ...run.counts, snapshot: progress.snapshot };
  showFacts(Object.entries(ABOUT).filter(([key]) => facts[key] != null)
    .map(([key, name]) => [name, fact(key, facts[key])]));
}

function fact(key, value) {
  if (key === "started") return new Date(value).toLocaleString();
  return typeof value === "number" ? number(value) : value;
}

const metricNames = () => [...new Set(run.epochs.flatMap((epoch) => Object.keys(epoch.logs)))];

function showEpochs() {
  const names = metricNames();
  const columns = [["Epoch"], ["Seconds"], ["Rows/s"], ...names.map((name) => [name])];
  const rows = run.epochs.slice().reverse().map((epoch) => [
    epoch.epoch, epoch.seconds.toFixed(1), number(Math.round(epoch.rows / epoch.seconds)),
    ...names.map((name) => number(epoch.logs[name]))]);
  fillTable(find("epochs"), columns, rows);
}

function showWorkers() {
  const behind = run.workers.some((worker) => worker.staleness != null);
  const late = run.workers.some((worker) => worker.dropped);
  const over = isOver();
  const columns = [["Worker"], ["Host", "text host"], ["Device", "text"], ["State", "text"], ["Epoch"], ["Rows"], ["Rows/s"],
    ...(behind ? [["Staleness"]] : []), ...(late ? [["Dropped"]] : []), ["Received"], ["Sent"],
    ...(over ? [] : [["Heard"]]), ["Retries"]];
  fillTable(find("workers"), columns, run.workers.map((worker) => [
    worker.worker, worker.host, worker.device,
    worker.lost ? "lost" : over ? "ended" : worker.heard > 5 ? "silent" : "active",
    worker.epoch, `${number(worker.seen)} of ${number(worker.rows)}`, number(Math.round(worker.speed)),
    ...(behind ? [number(worker.staleness)] : []), ...(late ? [number(worker.dropped)] : []), bytes(worker.received), bytes(worker.sent),
    ...(over ? [] : [`${worker.heard.toFixed(1)} s ago`]), worker.retries,
  ]));
}

// A metric begins anew with each epoch, and so does the line. An epoch with few points has none.
function withinEpochs(points, name) {
  const x = [], y = [];
  const epochOf = (point) => Math.ceil(point.at);  // the last point of an epoch is at its end
  for (const epoch of new Set(points.map(epochOf))) {
    const inner = points.filter((point) => epochOf(point) === epoch);
    if (inner.length < FEWEST_POINTS) continue;
    x.push(...inner.map((point) => point.at), null);
    y.push(...inner.map((point) => point.logs[name]), null);
  }
  return { x, y, mode: "lines", line: { width: 1, color: "#7f8c99" } };
}

function tracesOf(name) {
  const traces = [];
  const within = withinEpochs(run.points.filter((point) => typeof point.logs[name] === "number"), name);
  if (within.x.length) traces.push({ name: "within epochs", ...within });
  for (const [key, title, color] of [[name, "training", COLORS[0]], [`val_${name}`, "validation", COLORS[1]]]) {
    const epochs = run.epochs.filter((epoch) => typeof epoch.logs[key] === "number");
    if (epochs.length) {
      traces.push({ name: title, mode: "lines+markers", marker: { color }, line: { color },
        x: epochs.map((epoch) => epoch.epoch), y: epochs.map((epoch) => epoch.logs[key]) });
    }
  }
  return traces;
}

function showCharts() {
  if (!window.Plotly) return;
  const inner = run.points.flatMap((point) => Object.keys(point.logs));
  const names = [...new Set([...inner, ...metricNames()].map((name) => name.replace(/^val_/, "")))];
  const charts = names.map((name) => [name, tracesOf(name)]).filter(([, traces]) => traces.length);
  const places = charts.map(([name]) => placeOf(find("charts"), `chart-${name}`));
  charts.forEach(([name, traces], index) => {
    const title = `${name} by epoch`;
    draw(places[index], title, traces, { title: { text: title, font: { size: 14 } } });
  });
}

function showTimes() {
  const workers = run.workers.filter((worker) => worker.times && worker.times.length);
  find("times").hidden = find("times-title").hidden = !workers.length;
  if (!workers.length) return;
  fillTable(find("times-table"), ["Worker", ...TIMES].map((name) => [name]),
    workers.map((worker) => [worker.worker, ...TIMES.map((_, index) => duration(worker.times[index]))]));
  if (!window.Plotly) return;
  const traces = TIMES.map((name, index) => ({
    name, type: "bar", orientation: "h", y: workers.map((worker) => `worker ${worker.worker}`),
    x: workers.map((worker) => worker.times[index]),
  }));
  draw(placeOf(find("times"), "chart-times"), "Seconds of each worker by activity", traces,
    { barmode: "stack", margin: { l: 48, r: 12, t: 8, b: 40 }, yaxis: { ...look().yaxis, autorange: "reversed" } });
}

function showStaleness() {
  const last = run.staleness.findLastIndex((count) => count > 0);
  find("staleness").hidden = last < 0;
  if (last < 0) return;
  const counts = run.staleness.slice(0, last + 1);
  const names = counts.map((_, index) => (index + 1 === run.staleness.length ? `${index} or more` : `${index}`));
  fillTable(find("staleness-table"), [["Staleness"], ["Updates"]],
    counts.map((count, index) => [names[index], number(count)]));
  if (window.Plotly) {
    draw(placeOf(find("staleness-chart"), "chart-staleness"), "Number of updates by staleness",
      [{ type: "bar", x: names, y: counts }], { showlegend: false, xaxis: { ...look().xaxis, type: "category" } });
  }
}

function take(values) {
  for (const name of ["epochs", "points"]) {
    run[name] = values.whole ? values[name] : run[name].concat(values[name]);
  }
  if (values.whole) find("events").replaceChildren();
  const added = values.events;
  Object.assign(run, { ...values, epochs: run.epochs, points: run.points });
  showProgress();
  showEpochs();
  showWorkers();
  showEvents(added);
  showStaleness();
  showTimes();
  showCharts();
  showButtons(run.state === "training");
}

function redraw() {
  showCharts();
  showTimes();
  showStaleness();
}

start();
