"use strict";
// The parts that all pages share. Each page has a script of its own, which defines take(values) and redraw().
const settings = JSON.parse(document.getElementById("settings").textContent);
const run = { about: {}, epochs: [], points: [] };
const find = (id) => document.getElementById(id);
const COLORS = ["#1f77b4", "#d55e00", "#2a9d4e", "#9467bd", "#c2a000", "#8c564b"];
const PATIENCE_SECONDS = 10;  // until the first event, before the state is requested instead

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

const isOver = () => ["finished", "stopped", "failed", "continued"].includes(run.state);

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

function showState(name, words) {
  find("name").textContent = name || "sparkdl";
  document.title = `${name || "sparkdl"}: ${words}`;
  find("state").textContent = words;
  find("state").dataset.state = run.state;
}

function showFacts(pairs) {
  find("about").replaceChildren(...pairs.map(([name, text]) => {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", text));
    return pair;
  }));
}

function showButtons(working) {
  find("buttons").hidden = settings.run !== undefined || !working;
  document.querySelectorAll("[data-stop]").forEach((button) => {
    button.disabled = run.stop_request === "now" || run.stop_request === button.dataset.stop;
  });
  if (run.reason) notice(run.reason);
}

function start() {
  if (settings.hint) {
    find("hint").textContent = settings.hint;
    find("hint").hidden = false;
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  if (settings.run) {
    take(settings.run);
  } else {
    history.replaceState(null, "", location.pathname);
    follow();
  }
}
