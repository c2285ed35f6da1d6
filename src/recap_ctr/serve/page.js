"use strict";
const by = (id) => document.getElementById(id);
const POLL_MS = 2000, MAX_READINGS = 90, MAX_CONTRIBUTIONS = 10;
let model = null, token = "";

const element = (tag, text, attributes = {}) => {
  const node = document.createElement(tag);
  node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};
const number = (value, digits) => (value === null || value === undefined ? "" : Number(value).toFixed(digits));
const settingName = (s) => `${s.routes} route${s.routes === 1 ? "" : "s"}` + (s.depth === null ? "" : `, depth ${s.depth}`);

const fail = (text) => { by("problem").textContent = text; by("problem").hidden = !text; };

async function ask(path, body) {
  const options = { headers: token ? { authorization: `Bearer ${token}` } : {} };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  if (body) options.headers["content-type"] = "application/json";
  const answer = await fetch(path, options);
  by("login").hidden = answer.status !== 401;
  if (!answer.ok) {
    const problem = await answer.json();
    throw new Error(problem.error + (problem.fix ? `\n${problem.fix}` : ""));
  }
  return answer;
}

// The form: one input per field, with suggestions from the vocabulary.
function buildForm() {
  by("fields").replaceChildren(...model.fields.map((field, index) => {
    const box = element("div", "");
    const input = element("input", "", { id: `f${index}`, autocomplete: "off", spellcheck: "false" });
    const several = field.kind === "multi" ? `, several joined by “${field.separator}”` : "";
    const unit = field.unit ? `, ${field.unit}` : "";
    box.append(element("label", `${field.name} (${field.kind}${several}${unit})`, { for: input.id }), input);
    if (field.kind === "numeric") input.inputMode = "decimal";
    if (field.suggestions) {
      const list = element("datalist", "", { id: `list${index}` });
      input.setAttribute("list", list.id);
      input.addEventListener("input", () => suggest(field, input, list));
      input.addEventListener("focus", () => { if (!list.children.length) suggest(field, input, list); });
      box.append(list);
    }
    return box;
  }));
}

async function values(field, prefix) {
  const path = `/vocabulary/${encodeURIComponent(field.name)}?prefix=${encodeURIComponent(prefix)}`;
  return (await (await ask(path)).json()).values;
}

async function suggest(field, input, list) {
  const text = input.value;
  const start = field.kind === "multi" ? text.lastIndexOf(field.separator) + field.separator.length : 0;
  const before = start >= field.separator?.length ? text.slice(0, start) : "";
  const matches = await values(field, text.slice(before.length)).catch(() => []);
  if (input.value === text) list.replaceChildren(...matches.map((value) => element("option", "", { value: before + value })));
}

async function fill() {
  await Promise.all(model.fields.map(async (field, index) => {
    if (field.suggestions) by(`f${index}`).value = (await values(field, "").catch(() => []))[0] ?? "";
  }));
  await score();
}

function enteredRow() {
  const row = {};
  model.fields.forEach((field, index) => {
    const text = by(`f${index}`).value.trim();
    if (text !== "") row[field.name] = text;
  });
  return row;
}

const sigmoid = (z) => 1 / (1 + Math.exp(-z));

// Disagreement is measured before calibration, so the ends of its range are calibrated as the answer is: each setting
// has a calibration of its own, unless the artifact is older.
function calibrated(z, at) {
  const { kind, scale, shift, knots, values } = (at > 0 ? model.settings[at].calibration : null) ?? model.calibration ?? {};
  if (kind === "affine") return scale * z + shift;
  if (kind !== "isotonic") return z;
  const above = knots.findIndex((knot) => knot > z);
  if (above <= 0) return values[above === 0 ? 0 : values.length - 1];
  const share = (z - knots[above - 1]) / (knots[above] - knots[above - 1]);
  return values[above - 1] + share * (values[above] - values[above - 1]);
}
const spread = (answer, at = 0) => [-2, 2].map((times) => sigmoid(calibrated(answer.raw_logit + times * answer.disagreement, at)));

// Scores the row at every setting; the first setting gives the answer.
async function score() {
  fail("");
  try {
    const rows = [enteredRow()];
    const answers = await Promise.all(model.settings.map(async (s, index) => {
      const body = { rows, routes: s.routes, deadline_ms: 10000 };
      if (index === 0) body.explain = MAX_CONTRIBUTIONS;
      if (s.depth !== null) body.depth = s.depth;
      return (await (await ask("/score", body)).json()).rows[0];
    }));
    show(answers);
  } catch (error) {
    fail(error.message);
  }
}

function show(answers) {
  const best = answers[0];
  const [low, high] = spread(best);
  const disagreement = best.disagreement > 0
    ? `Nearly all routes lie between ${number(low, 4)} and ${number(high, 4)}; the standard deviation of their logits before calibration is ${number(best.disagreement, 4)}.`
    : "A single route has no disagreement.";
  by("result").replaceChildren(
    element("p", number(best.probability, 4), { class: "answer", id: "probability" }),
    element("p", `Probability of a click at ${settingName(model.settings[0])}. ${disagreement} Logit ${number(best.logit, 4)}, before calibration ${number(best.raw_logit, 4)}.`),
  );
  by("why").hidden = !best.contributions.length;
  by("contributions").replaceChildren(...best.contributions.map((c) => {
    const row = element("tr", "");
    for (const text of [c.field, c.value, (c.contribution < 0 ? "−" : "+") + number(Math.abs(c.contribution), 3)]) row.append(element("td", text));
    return row;
  }));
  const names = [...by("settings").parentNode.querySelectorAll("th")].map((cell) => cell.textContent);
  by("settings").replaceChildren(...model.settings.map((s, index) => {
    const row = element("tr", "", index ? {} : { class: "ours" });
    const ms = s.milliseconds, quality = s.quality ?? {};
    [settingName(s), number(answers[index].probability, 5), number(answers[index].disagreement, 4),
      number(ms["1"], 2), number(ms["100"], 1), number(ms["500"], 1), number(quality.auc, 5), number(quality.logloss, 5)]
      .forEach((text, at) => row.append(element("td", text, { "data-label": names[at] })));
    return row;
  }));
  const ends = answers.map(spread);
  chart(by("spread"), "Probability of this row by setting, with two standard deviations between routes", model.settings.map(settingName), [
    { name: "probability", y: answers.map((a) => a.probability), low: ends.map((e) => e[0]), high: ends.map((e) => e[1]), points: true },
  ], 4);
}

// Charts that look like those of the reports: plain SVG in the page's own colours.
function chart(figure, title, labels, series, digits) {
  // On a narrow screen letters are larger (.tick), so that fewer labels fit.
  const isNarrow = innerWidth <= 640;
  const W = 640, H = 220, L = isNarrow ? 92 : 64, R = series[0].points ? 16 : 46, T = isNarrow ? 20 : 12, B = 30;
  const all = series.flatMap((s) => [...s.y, ...(s.low ?? []), ...(s.high ?? [])]).filter(Number.isFinite);
  if (!all.length) { figure.replaceChildren(); return; }
  let low = Math.min(...all), high = Math.max(...all);
  if (!series[0].points) low = 0;
  if (high === low) { high += Math.abs(high) * 0.05 || 1; low -= series[0].points ? Math.abs(low) * 0.05 : 0; }
  const x = (at) => L + ((W - L - R) * (at + (series[0].points ? 0.5 : 0))) / Math.max(1, labels.length - (series[0].points ? 0 : 1));
  const y = (value) => T + ((H - T - B) * (high - value)) / (high - low);
  const decimals = Math.max(digits, Math.min(8, Math.ceil(-Math.log10((high - low) / 4)))); // No two ticks are alike.
  const space = "http://www.w3.org/2000/svg";
  const draw = (tag, attributes, text) => {
    const node = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const svg = draw("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
  for (let at = 0; at <= 4; at++) {
    const value = low + ((high - low) * at) / 4;
    svg.append(draw("line", { class: "grid", x1: L, x2: W - R, y1: y(value), y2: y(value) }),
      draw("text", { class: "tick", x: L - 6, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(decimals)));
  }
  const every = Math.ceil(labels.length / (isNarrow ? 3 : 6));
  labels.forEach((label, at) => {
    if (at % every === 0) svg.append(draw("text", { class: "tick", x: x(at), y: H - 8, "text-anchor": "middle" }, label));
  });
  series.forEach((s, which) => {
    if (s.points) {
      s.y.forEach((value, at) => {
        svg.append(draw("line", { class: "whisker", x1: x(at), x2: x(at), y1: y(s.low[at]), y2: y(s.high[at]) }));
        const mark = draw("circle", { class: `mark s${which}`, cx: x(at), cy: y(value), r: 5, tabindex: 0 });
        mark.append(draw("title", {}, `${labels[at]}: ${value.toFixed(decimals)}`));
        svg.append(mark);
      });
      return;
    }
    const path = s.y.map((value, at) => (Number.isFinite(value) ? `${x(at)},${y(value)}` : "")).filter(Boolean);
    svg.append(draw("polyline", { class: `line s${which}`, points: path.join(" ") }));
    if (path.length === 1) { // A line through a single point would not show.
      const [cx, cy] = path[0].split(",");
      svg.append(draw("circle", { class: `s${which}`, cx, cy, r: 4 }));
    }
  });
  const legend = element("ul", "", { class: "legend" });
  if (series.length > 1) series.forEach((s, which) => {
    const key = draw("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" });
    key.append(draw("circle", { class: `s${which}`, cx: 6, cy: 6, r: 5 }));
    const entry = element("li", s.name);
    entry.prepend(key);
    legend.append(entry);
  });
  figure.replaceChildren(element("strong", title), svg, ...(series.length > 1 ? [legend] : []));
}

// Load: the counters of all workers are read every two seconds; the charts show differences between readings.
const history = [];
let last = null;

function parse(text) {
  const metrics = {};
  for (const line of text.split("\n")) {
    const space = line.lastIndexOf(" ");
    if (line && !line.startsWith("#")) metrics[line.slice(0, space)] = Number(line.slice(space + 1));
  }
  return metrics;
}

function quantile(now, before, share) {
  const bucket = /^recap_request_seconds_bucket\{le="(.+)"\}$/;
  const counts = Object.keys(now).map((name) => bucket.exec(name)).filter(Boolean)
    .map((match) => [match[1] === "+Inf" ? Infinity : Number(match[1]), now[match[0]] - (before[match[0]] ?? 0)])
    .sort((a, b) => a[0] - b[0]);
  const total = counts.length ? counts[counts.length - 1][1] : 0;
  return total ? 1000 * counts.find(([, count]) => count >= share * total)[0] : NaN;
}

const sum = (now, before, prefix) => Object.keys(now).filter((name) => name.startsWith(prefix))
  .reduce((total, name) => total + now[name] - (before[name] ?? 0), 0);

async function poll() {
  try {
    const at = Date.now(), now = parse(await (await ask("/metrics")).text());
    if (last) {
      const seconds = (at - last.at) / 1000, before = last.now;
      history.push({
        time: new Date(at).toLocaleTimeString([], { hour12: false }),
        p50: quantile(now, before, 0.5), p99: quantile(now, before, 0.99),
        scored: sum(now, before, 'recap_requests_total{status="200"}') / seconds,
        refused: (sum(now, before, "recap_requests_total") - sum(now, before, 'recap_requests_total{status="200"}')) / seconds,
        lowered: sum(now, before, "recap_lowered_total") / seconds,
      });
      if (history.length > MAX_READINGS) history.shift();
      showLoad(now);
    }
    last = { at, now };
  } catch { /* The next reading may succeed. */ }
}

function showLoad(now) {
  const latest = history[history.length - 1], labels = history.map((h) => h.time);
  by("now").textContent = `${latest.scored.toFixed(1)} answers a second, ${latest.lowered.toFixed(1)} of them at a lowered dial, `
    + `${latest.refused.toFixed(1)} refused; ${now.recap_waiting_requests ?? 0} queued; ${sum(now, {}, "recap_rows_total").toLocaleString("en")} rows scored in all.`;
  chart(by("latency"), "Latency, ms (upper ends of √2-wide buckets)", labels, [
    { name: "p50", y: history.map((h) => h.p50) }, { name: "p99", y: history.map((h) => h.p99) }], 1);
  chart(by("rate"), "Requests a second", labels, [
    { name: "answered", y: history.map((h) => h.scored) }, { name: "at a lowered dial", y: history.map((h) => h.lowered) },
    { name: "refused", y: history.map((h) => h.refused) }], 1);
}

async function start() {
  fail("");
  try {
    model = await (await ask("/model")).json();
  } catch (error) {
    fail(error.message);
    return;
  }
  const parameters = model.parameters ? `, ${model.parameters.toLocaleString("en")} parameters` : "";
  by("title").textContent = `RECAP: ${model.name}, version ${model.model}`;
  by("lead").textContent = `Scores rows of ${model.fields.length} fields at ${model.settings.length} setting${model.settings.length === 1 ? "" : "s"} of the dial${parameters}.`;
  by("metrics").replaceChildren(...Object.entries(model.metrics ?? {}).map(([split, figures]) => {
    const row = element("tr", "");
    for (const text of [`${split}, ${figures.rows.toLocaleString("en")}`, number(figures.raw.auc, 5), number(figures.raw.logloss, 5), number(figures.calibrated.logloss, 5)])
      row.append(element("td", text));
    return row;
  }));
  by("swap").textContent = model.swap.outcome ? `Last offered version: ${model.swap.outcome} ${model.swap.time}. ${model.swap.reason ?? ""}` : "";
  by("card").textContent = model.card;
  buildForm();
  await fill();
  await poll();
  setInterval(poll, POLL_MS);
}

by("row").addEventListener("submit", (event) => { event.preventDefault(); score(); });
by("fill").addEventListener("click", fill);
by("clear").addEventListener("click", () => { for (const input of by("fields").querySelectorAll("input")) input.value = ""; });
by("login").addEventListener("submit", (event) => { event.preventDefault(); token = by("token").value; start(); });
start();
