"use strict";
const settings = JSON.parse(document.getElementById("settings").textContent);
const run = { about: {}, epochs: [], points: [] };
const find = (id) => document.getElementById(id);
const COLORS = ["#1f77b4", "#d55e00", "#2a9d4e", "#9467bd", "#c2a000", "#8c564b"];
const TIMES = settings.activities;
const STATES = {
  starting: "Starting", training: "Training", finished: "Finished", stopped: "Stopped", failed: "Failed",
};
const ABOUT = {
  mode: "Mode", frequency: "Frequency", merge: "Merge", workers: "Workers", batch_size: "Batch size",
  epochs: "Epochs", parameters: "Parameters", backend: "Backend", started: "Started",
  snapshot: "Last snapshot", exchanges: "Exchanges", retries: "Retries", late_dropped: "Late updates dropped",
  late_merged: "Late updates merged", not_finite: "Updates with NaN, Inf or too large values", lost: "Workers lost",
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
  columns.forEach(([name, isText]) =>
    head.append(element("th", name, { scope: "col", ...(isText && { class: "text" }) })));
  const body = rows.map((cells) => {
    const line = element("tr");
    cells.forEach((cell, index) => {
      const kind = columns[index][1] ? { class: "text" } : {};
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
  const speed = progress.seconds ? progress.rows / progress.seconds : 0;
  if (speed) parts.push(`${number(Math.round(speed))} rows/s`);
  if (run.state === "training" && speed && progress.total) {
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
  const timed = run.workers.some((worker) => worker.times && worker.times.length);
  const behind = run.workers.some((worker) => worker.staleness != null);
  const late = run.workers.some((worker) => worker.dropped);
  const columns = [["Worker"], ["Host", true], ["Device", true], ["State", true], ["Epoch"], ["Rows"], ["Rows/s"],
    ...(behind ? [["Staleness"]] : []), ...(late ? [["Dropped"]] : []), ["Received"], ["Sent"], ["Last heard"], ["Retries"],
    ...(timed ? TIMES.map((name) => [name]) : [])];
  const training = run.state === "training" || run.state === "starting";
  fillTable(find("workers"), columns, run.workers.map((worker) => [
    worker.worker, worker.host, worker.device,
    worker.lost ? "lost" : !training ? "ended" : worker.heard > 5 ? "silent" : "active",
    worker.epoch, `${number(worker.seen)} of ${number(worker.rows)}`, number(Math.round(worker.speed)),
    ...(behind ? [number(worker.staleness)] : []), ...(late ? [number(worker.dropped)] : []), bytes(worker.received), bytes(worker.sent),
    `${worker.heard.toFixed(1)} s ago`, worker.retries,
    ...(timed ? TIMES.map((_, index) => duration((worker.times || [])[index] || 0)) : []),
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
    legend: { orientation: "h", y: -0.2 },
  };
}

function draw(parent, id, label, traces, layout) {
  let place = document.getElementById(id);
  if (!place) {
    place = element("div", undefined, { id, class: "chart", role: "img" });
    parent.append(place);
    new ResizeObserver(() => place.data && window.Plotly.Plots.resize(place)).observe(place);
  }
  place.setAttribute("aria-label", label);
  window.Plotly.react(place, traces, { ...look(), ...layout }, { displayModeBar: false, responsive: true });
}

// A metric begins anew with each epoch, and so does the line.
function withinEpochs(points, name) {
  const x = [], y = [];
  points.forEach((point, index) => {
    if (index && Math.floor(point.at) !== Math.floor(points[index - 1].at)) {
      x.push(null);
      y.push(null);
    }
    x.push(point.at);
    y.push(point.logs[name]);
  });
  return { x, y, mode: "lines+markers", line: { width: 1, color: "#7f8c99" }, marker: { size: 4, color: "#7f8c99" } };
}

function showCharts() {
  if (!window.Plotly) return;
  const inner = run.points.flatMap((point) => Object.keys(point.logs));
  const names = [...new Set([...inner, ...metricNames()].map((name) => name.replace(/^val_/, "")))];
  for (const name of names) {
    const byEpoch = (key) => run.epochs.filter((epoch) => typeof epoch.logs[key] === "number");
    const traces = [];
    const within = run.points.filter((point) => typeof point.logs[name] === "number");
    if (within.length) {
      traces.push({ name: "within epochs", ...withinEpochs(within, name) });
    }
    for (const [key, title, color] of [[name, "training", COLORS[0]], [`val_${name}`, "validation", COLORS[1]]]) {
      const epochs = byEpoch(key);
      if (epochs.length) {
        traces.push({ name: title, mode: "lines+markers", marker: { color }, line: { color },
          x: epochs.map((epoch) => epoch.epoch), y: epochs.map((epoch) => epoch.logs[key]) });
      }
    }
    if (!traces.length) continue;
    const title = `${name} by epoch`;
    draw(find("charts"), `chart-${name}`, title, traces, { title: { text: title, font: { size: 14 } } });
  }
  showTimes();
}

function showTimes() {
  const workers = run.workers.filter((worker) => worker.times && worker.times.length);
  if (!workers.length) return;
  const traces = TIMES.map((name, index) => ({
    name, type: "bar", orientation: "h", y: workers.map((worker) => `worker ${worker.worker}`),
    x: workers.map((worker) => worker.times[index]),
  }));
  const title = "Seconds of each worker by activity";
  draw(find("times"), "chart-times", title, traces, { barmode: "stack", title: { text: title, font: { size: 14 } } });
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
    draw(find("staleness-chart"), "chart-staleness", "Number of updates by staleness",
      [{ type: "bar", x: names, y: counts }], { showlegend: false });
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
  showCharts();
  find("buttons").hidden = settings.run !== undefined || run.state !== "training";
  document.querySelectorAll("[data-stop]").forEach((button) => {
    button.disabled = run.stop_request === "now" || run.stop_request === button.dataset.stop;
  });
  if (run.reason) notice(run.reason);
}

const isOver = () => ["finished", "stopped", "failed"].includes(run.state);

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
  source.onmessage = (event) => {
    notice("");
    take(JSON.parse(event.data));
    if (isOver()) source.close();
  };
  source.onerror = () => {
    if (isOver()) return;
    notice("The connection to the run is interrupted. Trying again.");
    if (source.readyState === EventSource.CLOSED) poll();  // a proxy that does not pass streams, or too many viewers
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
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showCharts);
if (settings.run) {
  take(settings.run);
} else {
  history.replaceState(null, "", location.pathname);
  follow();
}
