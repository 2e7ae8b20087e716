// Charts as SVG, so that colours come from the style sheet and change with it.

const SVG = "http://www.w3.org/2000/svg";

function make(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

function draw(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// 1234567 -> "1.23 M"; enough digits to see a change, no more.
function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e9, " G"], [1e6, " M"], [1e4, " k"]]) {
    if (size >= limit) return (value / (limit === 1e4 ? 1e3 : limit)).toPrecision(3) + unit;
  }
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds === 0) return "0";
  if (seconds < 0.0995) return (seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0) + " ms";
  return seconds < 99.5 ? seconds.toPrecision(2) + " s" : Math.round(seconds) + " s";
}

const percent = (share) =>
  share === null || share === undefined ? "–" : (share * 100).toFixed(share > 0 && share < 0.0995 ? 1 : 0) + " %";

// The least of 1, 2, 5, 10, ... that is not less than `value`.
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

// One chart over time. `series` are {key, label, color}, `format` writes a value, `stacked` draws
// areas upon each other, `top` fixes the upper end.
class TimeChart {
  constructor(parent, { title, unit = "", series, format = short, stacked = false, top = null, wide = false, none = "nothing yet" }) {
    Object.assign(this, { title, series, format, stacked, top, none });
    this.keys = make("span", { class: "keys" });
    this.svg = draw("svg", { class: "plot", role: "img" });
    const caption = make("figcaption", {}, make("span", {}, title, " ", make("span", { class: "unit" }, unit)), this.keys);
    parent.append(make("figure", { class: wide ? "card chart wide" : "card chart" }, caption));
    parent.lastElementChild.append(this.svg);
    this.labels = series.map(({ color }) => {
      const key = make("span", { class: "s-" + color });
      this.keys.append(key);
      return key;
    });
    this.cursor = null;
    const point = (event) => {
      const box = this.svg.getBoundingClientRect();
      this.cursor = (event.clientX - box.left - 44) / Math.max(1, box.width - 44);
      this.render();
    };
    this.svg.addEventListener("pointermove", point);
    this.svg.addEventListener("pointerleave", () => { this.cursor = null; this.render(); });
  }

  update(samples, span) {
    this.samples = samples;
    this.span = span;
    this.render();
  }

  render() {
    const { samples, span, svg } = this;
    if (!samples) return;
    const box = svg.getBoundingClientRect();
    if (!box.width) return;
    const width = box.width, height = box.height, left = 44, bottom = 18;
    const end = samples.length ? samples[samples.length - 1].time : Date.now() / 1000;
    const x = (time) => width - ((end - time) / span) * (width - left);
    const value = (sample, key) => sample[key];
    let most = 0, found = false;
    for (const sample of samples) {
      let sum = 0;
      for (const { key } of this.series) {
        const v = value(sample, key);
        if (v === null || v === undefined) continue;
        found = true;
        sum = this.stacked ? sum + v : Math.max(sum, v);
      }
      most = Math.max(most, sum);
    }
    const top = this.top ? this.top(samples) : ceiling(most);
    const y = (v) => 4 + (1 - v / top) * (height - bottom - 4);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      parts.push(draw("line", { class: "grid", x1: left, x2: width, y1: y(share * top), y2: y(share * top) }));
      parts.push(draw("text", { x: left - 6, y: y(share * top) + 4, "text-anchor": "end" }, this.format(share * top)));
    }
    const minutes = Math.round(span / 60);
    parts.push(draw("text", { x: left, y: height - 3 }, minutes + " min ago"));
    parts.push(draw("text", { x: width, y: height - 3, "text-anchor": "end" }, "now"));
    if (!found || (!most && !this.stacked)) {
      parts.push(draw("text", { class: "none", x: (left + width) / 2, y: height / 2 - 4 }, found ? "none in the last " + minutes + " minutes" : this.none));
    }
    const base = samples.map(() => 0);
    for (const { key, color } of this.series) {
      if (this.stacked) {
        const upper = samples.map((sample, i) => base[i] + (value(sample, key) ?? 0));
        if (samples.length > 1) {
          const there = samples.map((s, i) => `${x(s.time).toFixed(1)},${y(upper[i]).toFixed(1)}`);
          const back = samples.map((s, i) => `${x(s.time).toFixed(1)},${y(base[i]).toFixed(1)}`).reverse();
          parts.push(draw("path", { class: "area s-" + color, d: "M" + [...there, ...back].join("L") + "Z" }));
        }
        upper.forEach((v, i) => { base[i] = v; });
      } else {
        let line = "", run = [];
        const close = () => {
          if (run.length === 1) run.push(run[0].replace(/^[\d.-]+/, (v) => (+v + 1).toFixed(1)));
          if (run.length) line += "M" + run.join("L");
          run = [];
        };
        for (const sample of samples) {
          const v = value(sample, key);
          if (v === null || v === undefined) close();
          else run.push(`${x(sample.time).toFixed(1)},${y(v).toFixed(1)}`);
        }
        close();
        if (line) parts.push(draw("path", { class: "s-" + color, d: line }));
      }
    }
    let shown = samples[samples.length - 1];
    if (this.cursor !== null && samples.length) {
      const time = end - (1 - this.cursor) * span;
      shown = samples.reduce((a, b) => (Math.abs(b.time - time) < Math.abs(a.time - time) ? b : a));
      parts.push(draw("line", { class: "cursor", x1: x(shown.time), x2: x(shown.time), y1: 4, y2: height - bottom }));
    }
    const words = this.series.map(({ key, label }, i) => {
      const text = `${label} ${shown ? this.format(value(shown, key)) : "–"}`;
      this.labels[i].textContent = text;
      return text;
    });
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("aria-label", `${this.title}: ${words.join(", ")}; at most ${this.format(most)} in ${minutes} minutes`);
    svg.replaceChildren(...parts);
  }
}
