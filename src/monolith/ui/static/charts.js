// Charts as plain SVG, and tables that say the same. Nothing here knows where the numbers come from.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 190;
const STYLES = 6;

export function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Numbers and times

export function count(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  for (const [unit, least] of [["G", 1e9], ["M", 1e6]]) {
    if (size >= 10 * least || (unit === "G" && size >= least)) return `${+(value / least).toPrecision(4)} ${unit}`;
  }
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return String(+value.toPrecision(3));
}

export function bytes(value) {
  if (value === null || value === undefined) return "";
  for (const [unit, least] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= least) return `${+(value / least).toPrecision(3)} ${unit}`;
  }
  return `${value} bytes`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 1) return `${+(seconds * 1e3).toPrecision(3)} ms`;
  if (seconds < 100) return `${+seconds.toPrecision(3)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

const two = (number) => String(number).padStart(2, "0");

export function moment(unix, utc = false) {
  const at = new Date(unix * 1e3);
  if (Number.isNaN(at.getTime())) return "";
  return utc
    ? `${at.toISOString().slice(0, 10)} ${at.toISOString().slice(11, 19)} UTC`
    : `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

function tick(kind, value, span) {
  if (kind === "step") return count(value);
  const text = moment(value, kind === "event");
  if (kind === "event") {
    if (span > 3 * 86400) return text.slice(5, 10);
    if (span > 2 * 3600) return `${text.slice(5, 10)} ${text.slice(11, 16)}`;
  }
  return span > 600 ? text.slice(11, 16) : text.slice(11, 19);
}

function niceStep(span, most) {
  const raw = span / most;
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= raw * 0.999);
}

function scaleOf(low, high, least) {
  let span = high - low;
  const smallest = least ?? Math.max(Math.abs(high) * 0.02, 1e-9);
  if (span < smallest) {
    const middle = (low + high) / 2;
    low = middle - smallest / 2;
    high = middle + smallest / 2;
    span = smallest;
  }
  const step = niceStep(span, 4);
  const first = Math.floor(low / step + 1e-9) * step;
  const ticks = [];
  for (let at = first; ; at += step) {
    ticks.push(+at.toPrecision(12));
    if (at >= high - step * 1e-9) break;
  }
  return { low: ticks[0], high: ticks.at(-1), ticks };
}

// Curves over time or steps

export class LineChart {
  constructor(figure, { title, unit, x, format, fromZero = false, least }) {
    Object.assign(this, { figure, title, unit, x, format, fromZero, least });
    this.series = [];
    const id = `c-${figure.dataset.chart}`;
    figure.setAttribute("aria-labelledby", id);
    this.box = make("div", {});
    this.readout = make("p", { class: "readout", "aria-hidden": "true" });
    this.legend = make("ul", { class: "legend" });
    this.details = make("details", {}, make("summary", {}, `${title} as a table`));
    this.table = make("div", { class: "scrolled", role: "region", tabindex: "0", "aria-label": `${title}, table` });
    this.details.append(this.table);
    const caption = make("figcaption", {}, make("h3", { id }, title), make("span", { class: "unit" }, unit));
    figure.replaceChildren(caption, this.legend, this.box, this.readout, this.details);
    this.details.addEventListener("toggle", () => this.tabulate());
    this.box.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.box.addEventListener("pointerleave", () => this.point(null));
  }

  // series: [{name, points: [[x, y], ...], newest}], in a fixed order.
  show(series) {
    this.series = series.filter((one) => one.points.length || one.newest);
    this.figure.hidden = this.series.length === 0;
    if (!this.figure.hidden) {
      this.draw();
      this.name();
      if (this.details.open) this.tabulate();
    }
  }

  draw() {
    const width = Math.max(this.box.clientWidth, 240);
    const lines = this.series.map((one) => ending(one));
    const all = lines.flat();
    const ys = all.map((point) => point[1]);
    const vertical = scaleOf(this.fromZero ? 0 : Math.min(...ys), Math.max(...ys), this.least);
    const low = Math.min(...all.map((point) => point[0]));
    const high = Math.max(...all.map((point) => point[0]), low + 1);
    const labels = vertical.ticks.map((value) => this.format(value));
    const left = 8 + 6.3 * Math.max(...labels.map((label) => label.length));
    const inner = { left, right: width - 12, top: 8, bottom: HEIGHT - 22 };
    const px = (x) => inner.left + ((x - low) / (high - low)) * (inner.right - inner.left);
    const py = (y) => inner.bottom - ((y - vertical.low) / (vertical.high - vertical.low)) * (inner.bottom - inner.top);
    const svg = shape("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": this.summary() });
    vertical.ticks.forEach((value, at) => {
      svg.append(shape("line", { class: "grid", x1: inner.left, x2: inner.right, y1: py(value), y2: py(value) }));
      svg.append(shape("text", { class: "axis", x: inner.left - 5, y: py(value) + 4, "text-anchor": "end" }, labels[at]));
    });
    const wide = 7 * tick(this.x, high, high - low).length + 48;
    const most = Math.min(6, Math.max(1, Math.floor((inner.right - inner.left) / wide)));
    for (let at = 0; at <= most; at += 1) {
      const value = low + ((high - low) * at) / most;
      const anchor = at === 0 ? "start" : at === most ? "end" : "middle";
      svg.append(shape("text", { class: "axis", x: px(value), y: HEIGHT - 6, "text-anchor": anchor }, tick(this.x, value, high - low)));
    }
    lines.forEach((points, at) => {
      const d = points.map(([x, y], number) => `${number ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
      if (points.length === 1) svg.append(shape("circle", { class: `curve s${at % STYLES}`, cx: px(points[0][0]), cy: py(points[0][1]), r: 2.5 }));
      else svg.append(shape("path", { class: `curve s${at % STYLES}`, d }));
    });
    this.cursor = shape("line", { class: "cursor", x1: -10, x2: -10, y1: inner.top, y2: inner.bottom, visibility: "hidden" });
    svg.append(this.cursor);
    this.place = { inner, low, high };
    this.box.replaceChildren(svg);
  }

  name() {
    this.series.forEach((one, at) => {
      let item = this.legend.children[at];
      if (!item) {
        const mark = shape("svg", { viewBox: "0 0 26 8", "aria-hidden": "true" });
        mark.append(shape("line", { class: `curve s${at % STYLES}`, x1: 0, x2: 26, y1: 4, y2: 4 }));
        item = make("li", {}, mark, make("span"), make("b"));
        this.legend.append(item);
      }
      setText(item.children[1], one.name);
      setText(item.children[2], this.format((one.newest ?? one.points.at(-1))[1]));
    });
    while (this.legend.children.length > this.series.length) this.legend.lastElementChild.remove();
  }

  summary() {
    const now = this.series.map((one) => `${one.name} ${this.format((one.newest ?? one.points.at(-1))[1])}`);
    return `${this.title}, ${this.unit}. Now: ${now.join("; ")}. The table below has the numbers.`;
  }

  point(offset) {
    if (!this.place) return;
    const { inner, low, high } = this.place;
    if (offset === null || offset < inner.left || offset > inner.right) {
      this.cursor.setAttribute("visibility", "hidden");
      setText(this.readout, "");
      return;
    }
    const at = low + ((offset - inner.left) / (inner.right - inner.left)) * (high - low);
    this.cursor.setAttribute("visibility", "visible");
    this.cursor.setAttribute("x1", offset);
    this.cursor.setAttribute("x2", offset);
    const values = this.series.map((one) => `${one.name} ${this.format(nearest(ending(one), at)[1])}`);
    setText(this.readout, `${this.where(at)}: ${values.join(", ")}`);
  }

  where(x) {
    return this.x === "step" ? `step ${count(Math.round(x))}` : moment(x, this.x === "event");
  }

  tabulate() {
    if (!this.details.open) return;
    const rows = [];
    for (const one of this.series) {
      const points = ending(one);
      const every = Math.max(1, Math.floor(points.length / 12));
      points.forEach(([x, y], at) => {
        if ((points.length - 1 - at) % every === 0) rows.push([one.name, this.where(x), this.format(y)]);
      });
    }
    const head = this.x === "step" ? "step" : this.x === "event" ? "event time" : "time";
    fill(this.table, ["curve", head, `>${this.unit}`], rows, `${this.title}: a dozen points of each curve, the newest last`);
  }
}

function ending(one) {
  const last = one.points.at(-1);
  return one.newest && (!last || one.newest[0] > last[0]) ? [...one.points, one.newest] : one.points;
}

function nearest(points, x) {
  let best = points[0];
  for (const point of points) if (Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
  return best;
}

// Histograms

export function drawBars(box, label, bounds, counts) {
  const width = Math.max(box.clientWidth, 120);
  const height = 84;
  const bottom = height - 16;
  const last = counts.findLastIndex((one) => one > 0);
  const first = counts.findIndex((one) => one > 0);
  const from = Math.max(0, first - 1);
  const to = Math.min(counts.length - 1, Math.max(last + 1, from + 5));
  const shown = counts.slice(from, to + 1);
  const most = Math.max(...shown, 1);
  const step = width / shown.length;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  svg.append(shape("line", { class: "grid", x1: 0, x2: width, y1: bottom, y2: bottom }));
  shown.forEach((one, at) => {
    const tall = one ? Math.max((one / most) * (bottom - 4), 1.5) : 0;
    svg.append(shape("rect", { class: "bar", x: at * step + 1, width: step - 2, y: bottom - tall, height: tall }));
  });
  const edge = (at) => (at < 0 ? "0" : bounds[at] === null ? "more" : duration(bounds[at]));
  svg.append(shape("text", { class: "axis", x: 0, y: height - 3 }, edge(from - 1)));
  svg.append(shape("text", { class: "axis", x: width, y: height - 3, "text-anchor": "end" }, edge(to)));
  box.replaceChildren(svg);
}

// Tables. Cells are changed in place: what somebody has selected, or is being read out, stays.

export function fill(box, headings, rows, caption) {
  let table = box.querySelector("table");
  const shape_ = headings.join("|");
  if (!table || table.dataset.shape !== shape_) {
    const head = make("tr");
    for (const heading of headings) {
      head.append(make("th", { scope: "col", class: heading.startsWith(">") ? "n" : "" }, heading.replace(/^[>~]/, "")));
    }
    table = make("table", {}, make("caption"), make("thead", {}, head), make("tbody"));
    table.dataset.shape = shape_;
    box.replaceChildren(table);
  }
  setText(table.caption, caption);
  const body = table.tBodies[0];
  rows.forEach((row, at) => {
    const line = body.rows[at] ?? body.insertRow();
    row.forEach((cell, column) => {
      const { text, kind } = typeof cell === "object" && cell !== null ? cell : { text: cell, kind: "" };
      let place = line.cells[column];
      if (!place) {
        place = column === 0 ? make("th", { scope: "row" }) : make("td");
        line.append(place);
      }
      setText(place, String(text ?? ""));
      const form = { ">": "n", "~": "wrap" }[headings[column][0]] ?? "";
      const wanted = `${form} ${kind ?? ""}`.trim();
      if (place.className !== wanted) place.className = wanted;
    });
  });
  while (body.rows.length > rows.length) body.deleteRow(-1);
}
