// The page: reads what is new from /events, and draws it. Nothing is fetched from anywhere else.

import { LineChart, bytes, count, drawBars, duration, fill, make, moment, setText } from "./charts.js";

const QUIET_MS = 40_000; // the server says something at least every 15 s
const byId = (id) => document.getElementById(id);
const score = (value) => value.toFixed(4);
const CHARTS = {
  auc: { title: "AUC, online", unit: "over event time", x: "event", format: score, least: 0.01 },
  auc_by_step: { title: "AUC, online, by step", unit: "by step", x: "step", format: score, least: 0.01 },
  evaluation: { title: "AUC, evaluated", unit: "by step", x: "step", format: score, least: 0.01 },
  examples: { title: "Examples trained on", unit: "per second", x: "clock", format: count, fromZero: true },
  requests: { title: "Requests served", unit: "per second", x: "clock", format: count, fromZero: true },
  latency: { title: "Latency of answers", unit: "ms", x: "clock", format: count, fromZero: true },
};
const charts = new Map();
const curves = new Map();
const down = new Set();
let sources = [];
let now = 0;

for (const figure of document.querySelectorAll("figure[data-chart]")) {
  charts.set(figure.dataset.chart, new LineChart(figure, CHARTS[figure.dataset.chart]));
}

const SPEED = ["examples", "requests", "latency"];
const number = (value) => String(+value.toPrecision(5));

// A metric on a scale of its own has a chart of its own, made when its first point comes.
function chartOf(name) {
  if (charts.has(name)) return;
  const [base, axis] = [name.slice(0, name.indexOf(":")), name.slice(name.indexOf(":") + 1)];
  const figure = make("figure", { "data-chart": name });
  document.querySelector("#h-quality + .charts").append(figure);
  const title = `${axis}, ${base === "online" ? "online" : "evaluated"}`;
  charts.set(name, new LineChart(figure, { title, unit: "by step", x: "step", format: number }));
}

// What comes

function take(news, fresh) {
  if (fresh) curves.clear();
  sources = news.sources;
  now = news.time;
  for (const one of news.curves) {
    chartOf(one.chart);
    const key = JSON.stringify([one.chart, one.source, one.label]);
    const known = curves.get(key);
    const points = one.whole || !known ? one.points : [...known.points, ...one.points];
    curves.set(key, { ...one, points });
  }
  draw();
}

function draw() {
  drawSources();
  for (const [name, chart] of charts) chart.show(seriesOf(name));
  drawStages();
  drawPublish();
  drawSplits();
  drawTables();
  for (const [part, there] of [
    ["quality", [...charts.keys()].some((name) => !SPEED.includes(name) && shown(name))],
    ["speed", SPEED.some(shown)],
    ["freshness", sources.some((one) => one.stages?.length)],
    ["publish", sources.some((one) => one.publish)],
    ["tables", sources.some((one) => one.tables?.length)],
    ["models", sources.some((one) => one.models?.length)],
    ["splits", sources.some((one) => one.splits?.length) || byId("said-split").textContent],
    ["processes", sources.some((one) => one.processes?.length)],
    ["checkpoints", sources.some((one) => one.checkpoints?.length)],
  ]) byId(`h-${part}`).parentElement.hidden = !there;
}

const shown = (name) => !charts.get(name).figure.hidden;

function seriesOf(chart) {
  const found = [...curves.values()].filter((one) => one.chart === chart);
  const order = new Map(sources.map((one, at) => [one.name, at]));
  found.sort((a, b) => order.get(a.source) - order.get(b.source) || a.label.localeCompare(b.label));
  const labels = new Set(found.map((one) => one.label));
  const alone = new Set(found.map((one) => one.source)).size === 1;
  return found.map((one) => ({
    name: labels.size < 2 || !one.label ? one.source : alone ? one.label : `${one.source} ${one.label}`,
    points: one.points,
    newest: one.newest,
  }));
}

// Keeps as many children as there are items, made once each, so that focus and reading places stay.
function keep(list, items, build, update) {
  items.forEach((item, at) => {
    const child = list.children[at] ?? list.appendChild(build(item));
    update(child, item);
  });
  while (list.children.length > items.length) list.lastElementChild.remove();
}

function drawSources() {
  keep(
    byId("sources"),
    sources,
    () => make("li", {}, make("h3"), make("p"), make("p", { class: "soft" }), make("dl")),
    (item, one) => {
      setText(item.children[0], one.name);
      const state = one.up ? `${one.kind}, ${one.state}` : one.read_at ? `down since ${moment(one.since)}` : "down";
      setText(item.children[1], state);
      const kinds = { up: "good", ended: "soft", "not begun": "soft" };
      item.children[1].className = one.up ? kinds[one.state] ?? "bad" : "bad";
      setText(item.children[2], one.up ? one.note ?? "" : `${one.error}. It is asked again every second.`);
      keep(
        item.children[3],
        Object.entries(one.facts ?? {}),
        () => make("div", {}, make("dt"), make("dd")),
        (line, [name, value]) => {
          setText(line.children[0], name);
          setText(line.children[1], value);
        },
      );
    },
  );
  for (const one of sources) {
    if (one.up === down.has(one.name)) {
      down[one.up ? "delete" : "add"](one.name);
    }
  }
  setText(byId("connection"), down.size ? `live; down: ${[...down].join(", ")}` : "live");
}

function drawStages() {
  const box = byId("stages");
  const of = sources.filter((one) => one.stages?.length);
  keep(
    box,
    of,
    () => make("div", {}, make("h3", { class: "of-source" }), make("div", { class: "stages" }), details("Freshness as a table")),
    (part, one) => {
      setText(part.children[0], one.name);
      keep(
        part.children[1],
        one.stages,
        () => make("div", { class: "stage" }, make("h4"), make("p"), make("div")),
        (cell, { stage, seconds }) => {
          const total = seconds.counts.reduce((sum, value) => sum + value, 0);
          const whole = (text) => text.replaceAll(" ", "\u00a0"); // a line breaks between the two
          const [p50, p99] = [whole(`p50 ${upTo(seconds, "p50")}`), whole(`p99 ${upTo(seconds, "p99")}`)];
          const text = total ? `${p50}, ${p99}` : "no event of late";
          setText(cell.children[0], stage);
          setText(cell.children[1], text);
          drawBars(cell.children[2], `${stage}: ${text}`, seconds.bounds, seconds.counts);
        },
      );
      const rows = one.stages.map(({ stage, seconds }) => [
        stage,
        upTo(seconds, "p50"),
        upTo(seconds, "p99"),
        count(seconds.counts.reduce((sum, value) => sum + value, 0)),
      ]);
      fill(part.children[2].lastElementChild, ["stage", ">p50", ">p99", ">events"], rows, `${one.name}, the last minute`);
    },
  );
}

// What lies above the largest bound is only known to do so.
function upTo(seconds, which) {
  const largest = Math.max(...seconds.bounds.filter((bound) => bound !== null));
  return `${seconds[which] >= largest ? "over " : ""}${duration(seconds[which])}`;
}

function details(title) {
  const box = make("div", { class: "scrolled", role: "region", tabindex: "0", "aria-label": title });
  return make("details", {}, make("summary", {}, title), box);
}

function every(part, build) {
  return sources.flatMap((one) => (one[part] ?? []).map((item) => [one.name, ...build(item)]));
}

function drawTables() {
  fill(
    byId("tables"),
    ["source", "table", ">rows", ">memory", ">births", ">not admitted", ">refused", ">expired"],
    every("tables", (one) => [
      one.table,
      count(one.rows),
      bytes(one.bytes),
      count(one.births),
      count(one.filtered),
      { text: count(one.refused), kind: one.refused ? "bad" : "" },
      count(one.expired),
    ]),
    "Rows, memory, and what became of new ids",
  );
  fill(
    byId("models"),
    ["source", "model", "version", "state", "~reason"],
    every("models", (one) => [
      one.name,
      one.version,
      { text: one.state.toLowerCase(), kind: one.state === "READY" ? "good" : "bad" },
      one.reason,
    ]),
    "Versions that a server has",
  );
  fill(
    byId("processes"),
    ["source", "process", "state", "place", ">step", ">examples/s", ">behind", ">rows", ">memory", ">restarts", ">failovers"],
    every("processes", (one) => [
      one.name,
      { text: one.state, kind: one.trouble ? "bad" : "good" },
      one.place,
      count(one.step),
      count(one.examples_per_s),
      duration(one.lag_seconds),
      count(one.rows),
      bytes(one.bytes),
      { text: count(one.restarts), kind: one.restarts ? "held" : "" },
      count(one.failovers),
    ]),
    "Those in trouble first",
  );
  fill(
    byId("checkpoints"),
    ["source", "checkpoint", "saved", "kind", ">step", ">rows", ">size", "kept as", "~state"],
    every("checkpoints", (one) => [
      one.name,
      one.saved_at ? moment(one.saved_at) : "",
      one.kind,
      count(one.step),
      count(one.rows),
      bytes(one.bytes),
      one.marks.join(", "),
      one.problem ? { text: one.problem, kind: "bad" } : one.kind === "unfinished" ? "" : "ok",
    ]),
    "The newest first",
  );
}

// Publishing

function drawPublish() {
  keep(
    byId("publish"),
    sources.filter((one) => one.publish),
    () => {
      const item = make("li", {}, make("h3"), make("p"), make("p", { class: "soft" }), make("div", { class: "buttons" }));
      for (const verb of ["hold", "resume", "rollback"]) {
        const button = make("button", { type: "button" }, { hold: "Hold", resume: "Resume", rollback: "Roll back" }[verb]);
        button.addEventListener("click", () => act(verb, item.dataset.source));
        item.lastElementChild.append(button);
      }
      return item;
    },
    (item, one) => {
      const { held, reason, since, version, controllable } = one.publish;
      item.dataset.source = one.name;
      setText(item.children[0], one.name);
      setText(item.children[1], version ? `rolled back to ${version}` : held ? "held" : "publishing");
      item.children[1].className = held ? "held" : "good";
      const when = held && since ? `since ${moment(since)}` : "";
      setText(item.children[2], [reason, when].filter(Boolean).join(", "));
      const [hold, resume, rollback] = item.lastElementChild.children;
      item.lastElementChild.hidden = !controllable;
      for (const button of [hold, resume, rollback]) button.setAttribute("aria-label", `${button.textContent} publishing of ${one.name}`);
      hold.disabled = held || !one.up;
      resume.disabled = !held || !one.up;
      rollback.disabled = !one.up;
    },
  );
}

// Splits

function drawSplits() {
  keep(
    byId("splits"),
    sources.flatMap((one) => (one.splits ?? []).map((split) => ({ ...split, source: one.name, up: one.up }))),
    () => {
      const item = make("li", {}, make("h3"), make("ul"), make("div", { class: "buttons" }));
      const button = make("button", { type: "button" }, "Change");
      button.addEventListener("click", () => act("split", item.dataset.source, item.dataset.name));
      item.lastElementChild.append(button);
      return item;
    },
    (item, { source, name, targets, up }) => {
      Object.assign(item.dataset, { source, name });
      setText(item.children[0], `${name}, ${source}`);
      const weights = targets.split(",").map((one) => [one.slice(0, one.lastIndexOf(":")), +one.slice(one.lastIndexOf(":") + 1)]);
      const total = weights.reduce((sum, [, weight]) => sum + weight, 0);
      keep(
        item.children[1],
        weights,
        () => make("li"),
        (line, [target, weight]) => setText(line, `${target}: ${+((100 * weight) / total).toPrecision(4)} %`),
      );
      const [button] = item.lastElementChild.children;
      button.setAttribute("aria-label", `Change the split of ${name} of ${source}`);
      button.disabled = !up;
    },
  );
}

const ABOUT = {
  hold: ["Hold publishing", "Servers stay as they are. Training goes on.", "Why (shown to everybody)"],
  resume: ["Resume publishing", "Servers take in all that was learned meanwhile.", ""],
  split: ["Change the split", "Takes effect with the next request. No target at all ends the split.", "MODEL[/VERSION][:WEIGHT], separated by commas"],
  rollback: ["Roll back", "Servers go back to an exported version, and publishing is held. Training goes on.", "Version"],
};

async function act(verb, source, name) {
  const one = sources.find((other) => other.name === source);
  const of = name === undefined ? source : `${name}, ${source}`;
  const said = byId(verb === "split" ? "said-split" : "said");
  const [title, about, label] = ABOUT[verb];
  const dialog = byId("act");
  const input = byId("act-text");
  setText(byId("act-title"), `${title}: ${of}`);
  setText(byId("act-about"), about);
  setText(byId("act-label"), label);
  setText(byId("act-do"), title);
  // Those that the run knows of, and those that servers have.
  const served = sources.flatMap((other) => (other.models ?? []).map((model) => model.version));
  const versions = verb === "rollback" ? [...(one?.publish?.versions ?? []), ...served].filter(Boolean) : [];
  input.value = verb === "split" ? one?.splits.find((split) => split.name === name)?.targets ?? "" : "";
  input.maxLength = verb === "split" ? 2000 : 200;
  input.hidden = byId("act-label").hidden = !label;
  input.required = verb === "rollback";
  byId("act-list").replaceChildren(...[...new Set(versions)].map((value) => make("option", { value })));
  if ((await answerOf(dialog)) !== "do") return;
  const text = input.value.trim();
  const given = { hold: { reason: text }, rollback: { version: text }, split: { name, targets: text } };
  const body = { source, ...given[verb] };
  try {
    const answer = await fetch(verb === "split" ? "splits/set" : `publish/${verb}`, {
      method: "POST",
      headers: { ...authorization(), "Content-Type": "application/json", "X-Monolith-Page": "1" },
      body: JSON.stringify(body),
    });
    const { error } = await answer.json();
    setText(said, answer.ok ? `${title} of ${of}: done` : `${title} of ${of} failed: ${error}`);
  } catch {
    setText(said, `${title} of ${of} failed: the page's server does not answer`);
  }
}

byId("act-cancel").addEventListener("click", () => byId("act").close(""));

function answerOf(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true }));
}

// The stream

const KEPT = "monolith-page-token";

function authorization() {
  const token = sessionStorage.getItem(KEPT);
  return token ? { Authorization: `Bearer ${token}` } : {};
}

async function askToken() {
  sessionStorage.removeItem(KEPT);
  setText(byId("connection"), "a token is needed");
  await answerOf(byId("ask"));
  sessionStorage.setItem(KEPT, byId("ask-token").value.trim());
  byId("ask-token").value = "";
}

async function follow() {
  const stop = new AbortController();
  let quiet = setTimeout(() => stop.abort(), QUIET_MS);
  try {
    const answer = await fetch("events", { headers: authorization(), cache: "no-store", signal: stop.signal });
    if (answer.status === 401) return "token";
    if (!answer.ok) return "lost";
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    let fresh = true;
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return "lost";
      clearTimeout(quiet);
      quiet = setTimeout(() => stop.abort(), QUIET_MS);
      const events = (text + value).split("\n\n");
      text = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue;
        take(JSON.parse(event.slice(6)), fresh);
        fresh = false;
      }
    }
  } catch (error) {
    if (error instanceof SyntaxError || error instanceof TypeError === false) console.error(error);
    return "lost";
  } finally {
    clearTimeout(quiet);
  }
}

async function run() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(KEPT, given);
    history.replaceState(null, "", location.pathname);
  }
  for (;;) {
    const why = await follow();
    if (why === "token") {
      await askToken();
      continue;
    }
    setText(byId("connection"), "the page's server does not answer; trying again");
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

addEventListener("resize", () => draw());
draw();
run();
