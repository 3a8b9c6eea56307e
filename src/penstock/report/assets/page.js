// The sections of the page, each a picture with its numbers as text. Ranks of a job stand side by side.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const page = document.getElementById("page");
const redrawn = []; // what depends on the width of the window

const longest = Math.max(...RUNS.map((run) => run.length_s));
const sum = (values) => values.reduce((a, b) => a + b, 0);
const orDash = (value, show) => (value === null || value === undefined ? "–" : show(value));

// Add a section; `draw` returns the elements of one run, or null if the run has nothing to show there.
function section(id, title, text, draw) {
  const bodies = RUNS.map((run) => {
    const box = make("div", { class: "run", "data-run": run.name });
    const fill = () => {
      const width = Math.max(320, box.clientWidth || 600);
      box.replaceChildren(...[RUNS.length > 1 ? make("h3", {}, run.label) : null, ...(draw(run, width) || [nothing()])].filter(Boolean));
    };
    return { box, fill };
  });
  page.append(make("section", { id, "aria-labelledby": `${id}-title` },
    make("h2", { id: `${id}-title` }, title), make("p", { class: "faint" }, text),
    make("div", { class: "runs" }, bodies.map((each) => each.box))));
  bodies.forEach((each) => { each.fill(); redrawn.push(each.fill); });
}

const nothing = () => make("p", { class: "faint" }, "The log has nothing of this.");

const areRanks = RUNS.every((run) => run.summary.rank !== null);

function head() {
  const one = RUNS[0].summary;
  page.append(make("h1", {}, RUNS.length > 1 ? `${RUNS.length} ${areRanks ? "ranks of a job" : "runs"} side by side` : `A run of ${one.steps} optimizer steps`));
  page.append(make("p", { class: "faint" }, `${RUNS.map((run) => run.name).join(", ")} · policy ${one.policy}, device ${one.device} · Penstock ${DATA.version}`));
  for (const run of RUNS) {
    const of = RUNS.length > 1 ? `${run.label}: ` : "";
    if (!run.complete) page.append(make("p", { class: "warning" }, `${of}the log ends before its run did. What follows covers its first ${run.summary.steps} steps.`));
    if (run.lost_events) page.append(make("p", { class: "warning" }, `${of}the log lacks ${run.lost_events} events, because the disk did not keep up. Totals include them, pictures do not.`));
    if (run.missing_files) page.append(make("p", { class: "warning" }, `${of}the log was rotated: the events of its first ${run.missing_steps} steps are missing.`));
    for (const text of run.summary.warnings) page.append(make("p", { class: "warning" }, of + text));
  }
  if (RUNS.length === 1) tiles(RUNS[0]);
  else ranks();
}

const deviceOf = (run) => run.summary.memory.find((line) => line.memory === "device");
const medianStep = (run) => {
  const times = run.steps.bars.map((bar) => bar.step_s).sort((a, b) => a - b);
  return times.length ? times[Math.floor(times.length / 2)] : null;
};

function figuresOf(run) {
  const { summary } = run, device = deviceOf(run);
  return [
    ["would have been saved", summary.saved_peak_bytes ? bytes(summary.saved_peak_bytes) : "–", summary.saved_peak_bytes],
    ["most saved at once", orDash(device && device.peak_bytes, bytes), device && device.peak_bytes],
    ["budget of saved tensors", orDash(device && device.budget_bytes, bytes), device && device.budget_bytes],
    ["median time of a step", orDash(medianStep(run), seconds), medianStep(run)],
    ["time that training waited", percent(summary.elapsed_s ? run.stalled_s / summary.elapsed_s : 0), run.stalled_s],
    ["written to flash", bytes(summary.ssd_written_bytes), summary.ssd_written_bytes],
  ];
}

function tiles(run) {
  page.append(make("div", { class: "tiles" }, figuresOf(run).map(([name, text, exact]) =>
    make("div", { class: "tile", "data-name": name, "data-value": exact }, make("b", {}, text), make("span", {}, name)))));
}

function ranks() {
  const names = figuresOf(RUNS[0]).map(([name]) => [name, "number"]);
  page.append(make("section", { id: "ranks" }, table("Each in a line", ["", ...names],
    RUNS.map((run) => [run.label, ...figuresOf(run).map(([, text, exact]) => [text, exact])]))));
}

function memory(run, width) {
  const found = [];
  for (const one of run.memories) {
    const everywhere = RUNS.flatMap((each) => each.memories.filter((other) => other.memory === one.memory));
    const budget = one.budget_bytes && one.budget_bytes < 4 * one.peak_bytes ? one.budget_bytes : null;
    const top = 1.12 * Math.max(budget || 0, ...everywhere.map((other) => other.peak_bytes));
    found.push(make("h3", {}, `${one.memory}: at most ${bytes(one.peak_bytes)}${one.budget_bytes ? `, budget ${bytes(one.budget_bytes)}` : ""}`));
    found.push(make("figure", { "data-memory": one.memory }, chart({
      label: `Level of ${one.memory} memory over time, at most ${bytes(one.peak_bytes)}`,
      series: [{ name: one.memory, values: one.highest, fill: colour(run.memories.indexOf(one)) }],
      partS: run.part_s, lengthS: longest, top, show: bytes, base: 2, budget, width, height: 140,
    })));
  }
  if (!found.length) return null;
  found.push(table("Levels", ["memory", ["peak", "number"], ["average", "number"], ["budget", "number"]],
    run.summary.memory.map((line) => [line.memory, [bytes(line.peak_bytes), line.peak_bytes], [bytes(line.average_bytes), line.average_bytes], [orDash(line.budget_bytes, bytes), line.budget_bytes]])));
  found.push(more("levels over time as a table", tableOverTime("highest level in each part", run.memories.map((one) => ({ name: one.memory, values: one.highest })), run.part_s, bytes, highestOf)));
  return found;
}

function owners(run, width) {
  const { rows, limit_bytes: limit } = run.owners;
  if (!rows.length) return null;
  const series = rows.map((row, n) => ({ name: row.owner, values: row.highest, fill: colour(n) }));
  const together = rows[0].highest.map((_, k) => sum(rows.map((row) => row.highest[k])));
  const top = 1.12 * Math.max(highestOf(together), limit && limit < 4 * highestOf(together) ? limit : 0);
  const budget = limit && limit <= top ? limit : null;
  return [
    make("figure", {}, chart({ label: "Host memory held by Penstock, by owner", series, partS: run.part_s, lengthS: longest, top, show: bytes, base: 2, stacked: true, budget, width }),
      legend([...series.map((one) => [one.name, one.fill]), ...(budget ? [["memory limit", null]] : [])])),
    table("Most that each owner has held", ["owner", ["peak", "number"]], rows.map((row) => [row.owner, [bytes(row.peak_bytes), row.peak_bytes]])),
    more("owners over time as a table", tableOverTime("highest in each part", series, run.part_s, bytes, highestOf)),
  ];
}

const OWN = { weights_bytes: "weights and buffers", gradients_bytes: "gradients", states_bytes: "states of torch's optimizers" };

// What the process holds beside Penstock, in layers: the program's tensors once they are known, and the rest.
function layersOf(run, rest) {
  const { model, model_s: since } = run.process;
  const held = run.owners.rows.map((row) => row.owner); // weights that rest on flash are held by Penstock
  const layers = Object.entries(OWN).filter(([key]) => !held.includes(key.replace("_bytes", ""))).map(([key, name]) => ({ name, values: rest.map(() => 0), nbytes: model[key] || 0 }));
  const own = sum(layers.map((layer) => layer.nbytes));
  const other = rest.map((value, k) => {
    if (run.summary.device !== "cpu" || !own || value < own || k * run.part_s < since) return value;
    layers.forEach((layer) => { layer.values[k] = layer.nbytes; });
    return value - own;
  });
  return [...layers.filter((layer) => highestOf(layer.values)), { name: "the rest of the process", values: other }];
}

function whole(run, width) {
  const { highest, peak_bytes: peak, model } = run.process;
  if (!highest.length) return null;
  const held = highest.map((_, k) => sum(run.owners.rows.map((row) => row.highest[k])));
  const rest = highest.map((value, k) => Math.max(0, value - held[k]));
  const series = [{ name: "held by Penstock", values: held }, ...layersOf(run, rest)];
  series.forEach((one, n) => { one.fill = n === series.length - 1 ? COLOURS[COLOURS.length - 1] : colour(n); });
  return [
    make("figure", { "data-process": run.name }, chart({ label: `Memory of the process, at most ${bytes(peak)}`, series, partS: run.part_s, lengthS: longest, top: 1.12 * peak, show: bytes, base: 2, stacked: true, width }),
      legend(series.map((one) => [one.name, one.fill]))),
    Object.keys(model).length ? table("The program's own tensors at the end of the first step, on any device", ["", ["bytes", "number"]],
      Object.entries(OWN).map(([key, name]) => [name, [bytes(model[key] || 0), model[key] || 0]])) : null,
    more("the process over time as a table", tableOverTime("highest in each part", series, run.part_s, bytes, highestOf)),
  ];
}

const laneName = (lane) => ({
  write: `written to ${lane.place}`, read: `read from ${lane.place}`, copy_out: "copied from the device", copy_in: "copied to the device",
})[lane.stage] + (lane.client ? `: ${lane.client}` : "");

function link(run, width) {
  if (!run.lanes.length) return null;
  const top = 1.12 * Math.max(...RUNS.flatMap((each) => each.lanes.map((lane) => highestOf(lane.bytes_per_s))));
  const found = run.lanes.filter((lane) => !lane.is_once).map((lane, n) => make("figure", { "data-lane": laneName(lane) },
    make("h3", {}, laneName(lane)), chart({
      label: `Rate at which bytes were ${laneName(lane)}`, series: [{ name: "rate", values: lane.bytes_per_s, fill: colour(n) }],
      partS: run.part_s, lengthS: longest, top, show: rate, base: 10, width, height: 96,
    })));
  found.push(table("Transfers", ["", ["transfers", "number"], ["bytes", "number"], ["busy", "number"], ["of the run", "number"], ["rate while busy", "number"]],
    run.lanes.map((lane) => [laneName(lane), lane.transfers, [bytes(lane.nbytes), lane.nbytes], [seconds(lane.busy_s), lane.busy_s],
      percent(run.length_s ? lane.busy_s / run.length_s : 0), rate(lane.busy_s ? lane.nbytes / lane.busy_s : 0)])));
  found.push(more("rates over time as a table", tableOverTime("mean rate in each part", run.lanes.map((lane) => ({ name: laneName(lane), values: lane.bytes_per_s })), run.part_s, rate, meanOf)));
  return found;
}

function stalls(run, width) {
  const { causes, longest: waits } = run.stalls;
  if (!causes.length) return [make("p", {}, "Training never waited for Penstock.")];
  const series = causes.map((one, n) => ({ name: one.cause, values: one.share, fill: colour(n) }));
  const together = causes[0].share.map((_, k) => sum(causes.map((one) => one.share[k])));
  return [
    make("figure", {}, chart({ label: "Share of the time that training waited, by cause", series, partS: run.part_s, lengthS: longest, top: Math.max(0.01, 1.1 * highestOf(together)), show: percent, base: 10, stacked: true, width, height: 130 }),
      legend(series.map((one) => [one.name, one.fill]))),
    table("Waits by cause", ["cause", ["times", "number"], ["total", "number"], ["of the run", "number"]],
      causes.map((one) => [one.cause, one.times, [seconds(one.total_s), one.total_s], percent(run.length_s ? one.total_s / run.length_s : 0)])),
    more(`the ${waits.length} longest waits`, table("Longest first", [["at", "number"], ["waited", "number"], "cause", "slot"],
      waits.map((one) => [seconds(one.at_s), [seconds(one.dur_s), one.dur_s], one.cause, one.slot]))),
  ];
}

function steps(run, width) {
  const { bars, per_bar: each, count } = run.steps;
  if (!bars.length) return null;
  const times = bars.map((bar) => bar.step_s), sorted = times.slice().sort((a, b) => a - b);
  const middle = sorted[Math.floor(sorted.length / 2)];
  const top = 1.12 * Math.min(highestOf(times), Math.max(3 * middle, 1e-9)); // the first step may be far longer
  const made = axes({ width, height: 140, lengthS: 0, top, show: seconds, base: 10, label: `Times of ${count} steps, median ${seconds(middle)}. Arrow keys read them out.` });
  const right = width - RIGHT, wide = (right - LEFT) / bars.length;
  const waited = (bar) => sum(Object.values(bar.stalls_s));
  bars.forEach((bar, n) => {
    const x = LEFT + n * wide + wide * 0.08, w = Math.max(0.6, wide * 0.84);
    const full = Math.min(bar.step_s, top), stall = Math.min(waited(bar), full);
    made.svg.append(make("rect", { class: "step", x, width: w, y: made.y(full), height: made.y(0) - made.y(full), fill: colour(0), "data-value": bar.step_s }));
    made.svg.append(make("rect", { x, width: w, y: made.y(stall), height: made.y(0) - made.y(stall), fill: colour(1) }));
    if (bar.step_s > top) made.svg.append(make("text", { class: "over", x: Math.min(x, right - 60), y: TOP - 2 }, `↑ ${seconds(bar.step_s)}`));
  });
  [[0, LEFT, "start"], [bars.length - 1, right, "end"]].slice(0, bars.length).forEach(([n, x, anchor]) =>
    made.svg.append(make("text", { x, y: 134, "text-anchor": anchor, "aria-hidden": "true" }, `step ${bars[n].index}`)));
  const name = (bar) => (each > 1 ? `steps ${bar.index} to ${bar.index + each - 1}, mean` : `step ${bar.index}`);
  const readout = make("div", { class: "readout", "aria-live": "polite" });
  const say = (k) => `${name(bars[k])}: ${seconds(bars[k].step_s)}, waited ${seconds(waited(bars[k]))}`;
  const span = { x: (share) => LEFT + share * (right - LEFT), left: LEFT };
  readable(made.svg, span, bars.length, (k) => LEFT + (k + 0.5) * wide, readout, say, (share) => Math.floor(share * bars.length), 1);
  return [
    make("figure", {}, made.svg, readout, legend([["time of the step", colour(0)], ["of it, waited for Penstock", colour(1)]])),
    each > 1 ? make("p", { class: "faint" }, `Each bar is the mean of ${each} steps, for there are ${count}.`) : null,
    more("steps as a table", table("Steps", ["step", ["time", "number"], ["waited", "number"]], bars.map((bar) => [name(bar), [seconds(bar.step_s), bar.step_s], [seconds(waited(bar)), waited(bar)]]))),
  ];
}

function predicted(run) {
  const found = run.summary.prediction;
  if (!found) return [make("p", {}, "No prediction: no step ran under a plan that was replayed.")];
  const show = (line, value) => (line.unit === "s" ? seconds(value) : bytes(value));
  const bars = (line) => {
    const most = Math.max(line.predicted, line.measured) || 1;
    return make("div", { class: "pair", "aria-hidden": "true" },
      [[line.predicted, colour(2)], [line.measured, colour(0)]].map(([value, fill]) => make("i", { style: `width:${(100 * value) / most}%;background:${fill}` })));
  };
  return [
    legend([["predicted", colour(2)], ["measured", colour(0)]]),
    table(`Per optimizer step, ${found.steps} measured; a difference of +10 % is a prediction that was too high`, ["", "", ["predicted", "number"], ["measured", "number"], ["difference", "number"]],
      found.lines.map((line) => [line.what, [bars(line), null], [show(line, line.predicted), line.predicted], [show(line, line.measured), line.measured], orDash(line.difference, (share) => `${share > 0 ? "+" : ""}${(100 * share).toFixed(1)} %`)])),
  ];
}

function wear(run, width) {
  const { summary } = run;
  if (!run.written.length) return [make("p", {}, "Nothing was written to flash.")];
  const series = run.written.map((one, n) => ({ name: one.client, values: one.until, fill: colour(n) }));
  const top = 1.12 * Math.max(...RUNS.map((each) => sum(each.written.map((one) => one.nbytes))));
  const life = summary.tbw_bytes
    ? `${percent(summary.tbw_share)} of the ${bytes(summary.tbw_bytes)} that the SSD is rated for` + (summary.steps_to_wear_out ? `; at this rate they last ${summary.steps_to_wear_out.toPrecision(3)} optimizer steps.` : ".")
    : "The rated endurance of the SSD is not stated (tbw=...).";
  return [
    make("figure", {}, chart({ label: "Bytes written to flash until each moment", series, partS: run.part_s, lengthS: longest, top, show: bytes, base: 2, stacked: true, width, height: 120 }),
      legend(series.map((one) => [one.name, one.fill]))),
    table("Written to flash", ["by", ["bytes", "number"], ["per optimizer step", "number"]],
      summary.ssd_written.map((one) => [one.client, [bytes(one.nbytes), one.nbytes], one.is_per_step && summary.steps ? bytes(one.nbytes / summary.steps) : "–"])),
    make("p", {}, life),
  ];
}

function decisions(run) {
  const { places } = run.summary;
  const found = places.length ? [table("What stays and what goes, and why", ["action", "why", ["tensors", "number"], ["bytes", "number"]],
    places.map((one) => [one.tier ? `${one.action} → ${one.tier}` : one.action, one.reason, one.tensors, [bytes(one.nbytes), one.nbytes]]))] : [];
  if (run.marks.length) found.push(more(`${run.marks.length} events`, table("Events", [["at", "number"], "event", ["", "long"]], run.marks.map((one) => [seconds(one.at_s), one.name, one.text]))));
  return found.length ? found : null;
}
