"use strict";
const settings = JSON.parse(document.getElementById("settings").textContent);
const run = { about: {}, epochs: [], points: [] };
const find = (id) => document.getElementById(id);
const COLORS = ["#1f77b4", "#d55e00", "#2a9d4e", "#9467bd", "#c2a000", "#8c564b"];
const TIMES = settings.activities;
const SETTLED_SECONDS = 10;  // of the first epoch, before the time left is shown: the model is compiled first
const PATIENCE_SECONDS = 10;  // until the first event, before the state is requested instead
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

const NO_COOKIE = "The run did not receive the cookie of this page. Allow cookies in the browser, " +
  "or open the page without the proxy that removes them.";

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function number(value, digits = 4) {
  if (Array.isArray(value)) return value.map((each) => number(each, digits)).join(", ");
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : value.toPrecision(digits);
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; value >= 1000 && unit < 4; unit += 1) value /= 1000;
  return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

function duration(seconds) {
  const whole = Math.round(seconds);
  if (whole < 60) return `${seconds < 10 ? seconds.toFixed(1) : whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

function fillTable(table, columns, rows) {
  const head = element("tr");
  columns.forEach(([name, kind]) => head.append(element("th", name, { scope: "col", ...(kind && { class: kind }) })));
  const body = rows.map((cells) => {
    const line = element("tr");
    cells.forEach((cell, index) => {
      const kind = columns[index][1] ? { class: columns[index][1] } : {};
      line.append(index ? element("td", cell, kind) : element("th", cell, { scope: "row", ...kind }));
    });
    return line;
  });
  const top = element("thead");
  top.append(head);
  const rest = element("tbody");
  rest.append(...body);
  table.replaceChildren(top, rest);
}

const isOver = () => ["finished", "stopped", "failed"].includes(run.state);

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
  find("name").textContent = about.model || "sparkdl";
  document.title = `${about.model || "sparkdl"}: ${STATES[run.state] || ""}`;
  const stopping = run.state === "training" && run.stop_request;
  find("state").textContent = stopping ? "Stopping" : STATES[run.state] || "";
  find("state").dataset.state = run.state;
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
  find("about").replaceChildren(...Object.entries(ABOUT).filter(([key]) => facts[key] != null).map(([key, name]) => {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", fact(key, facts[key])));
    return pair;
  }));
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

function showEvents(added) {
  const list = find("events");
  for (const event of added) {
    const line = element("li", undefined, { class: event.level });
    line.append(element("time", duration(event.at)), element("span", event.text));
    list.prepend(line);
  }
  while (list.children.length > 300) list.lastChild.remove();
  if (!list.children.length) list.append(element("li", "None yet.", { class: "none" }));
  else list.querySelector(".none")?.remove();
}

function look() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: color("--line"), zerolinecolor: color("--line"), automargin: true };
  return {
    margin: { l: 48, r: 12, t: 32, b: 40 }, paper_bgcolor: color("--card"), plot_bgcolor: color("--card"),
    font: { color: color("--ink"), size: 12 }, xaxis: { ...axis }, yaxis: { ...axis }, colorway: COLORS,
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", traceorder: "normal" },
  };
}

// Return the place of a chart. All places are made before the first chart is drawn: a chart takes the size that its
// place has then, and a place that is added later makes the others narrower.
function placeOf(parent, id) {
  let place = document.getElementById(id);
  if (!place) {
    place = element("div", undefined, { id, class: "chart", role: "img" });
    parent.append(place);
    new ResizeObserver(() => place.data && window.Plotly.Plots.resize(place)).observe(place);
  }
  return place;
}

function draw(place, label, traces, layout) {
  place.setAttribute("aria-label", label);
  window.Plotly.react(place, traces, { ...look(), ...layout }, { displayModeBar: false });
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
  find("buttons").hidden = settings.run !== undefined || run.state !== "training";
  document.querySelectorAll("[data-stop]").forEach((button) => {
    button.disabled = run.stop_request === "now" || run.stop_request === button.dataset.stop;
  });
  if (run.reason) notice(run.reason);
}

function notice(text) {
  find("notice").textContent = text;
  find("notice").hidden = !text;
}

async function post(path, body) {
  const headers = { "X-CSRF-Token": settings.csrf, "Content-Type": "application/json" };
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
  if (!answer.ok) throw new Error((await answer.json()).error);
  return answer.json();
}

function follow() {
  const source = new EventSource("events");
  const giveUp = () => {
    clearTimeout(timer);
    source.close();
    poll();
  };
  const timer = setTimeout(giveUp, 1000 * PATIENCE_SECONDS);  // a proxy may keep all events until the run ends
  source.onmessage = (event) => {
    clearTimeout(timer);
    notice("");
    take(JSON.parse(event.data));
    if (isOver()) source.close();
  };
  source.onerror = () => {
    if (isOver()) return;
    notice("The connection to the run is interrupted. Trying again.");
    if (source.readyState === EventSource.CLOSED) giveUp();  // a proxy that does not pass streams, or too many viewers
  };
}

async function poll() {
  try {
    const answer = await fetch("state");
    if (answer.status === 401) {
      notice(run.state ? (await answer.json()).error : NO_COOKIE);
      return;
    }
    take(await answer.json());
    notice(run.reason);
  } catch {
    notice("The run cannot be reached. It may have ended.");
  }
  if (!isOver()) setTimeout(poll, 3000);
}

document.querySelectorAll("[data-stop]").forEach((button) => button.addEventListener("click", async () => {
  button.disabled = true;
  try {
    await post("stop", { when: button.dataset.stop });
  } catch (error) {
    notice(String(error.message));
    button.disabled = false;
  }
}));
find("link").addEventListener("click", async () => {
  try {
    const { link } = await post("link", {});
    window.prompt("This link works once:", new URL(link, document.baseURI).href);
  } catch (error) {
    notice(String(error.message));
  }
});
if (settings.hint) {
  find("hint").textContent = settings.hint;
  find("hint").hidden = false;
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  showCharts();
  showTimes();
  showStaleness();
});
if (settings.run) {
  take(settings.run);
} else {
  history.replaceState(null, "", location.pathname);
  follow();
}
