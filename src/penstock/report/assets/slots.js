// The life of each slot in one pass, as a bar; and the order of the page.

const FILLS = { held: "var(--held)", away: "var(--away)", write: "var(--c1)", copy_out: "var(--c1)", read: "var(--c3)", copy_in: "var(--c3)", recompute: "var(--c4)" };
const ROW = 17;

function told(slot) {
  const action = slot.action ? `${slot.action}${slot.tier ? ` to ${slot.tier}` : ""}${slot.codec ? `, encoded by ${slot.codec}` : ""}` : "moved";
  const kind = [slot.module_kind, slot.dtype].filter(Boolean).join(", ");
  const away = slot.parts.filter(([stage]) => stage === "away").reduce((total, [, from, to]) => total + to - from, 0);
  const times = `${slot.measured ? "" : "about "}${seconds(slot.parts[0][1])} to ${seconds(Math.max(...slot.parts.map((part) => part[2])))}`;
  return `${slot.slot}${kind ? ` (${kind})` : ""}: ${action}. Why: ${slot.reason}. Lives from ${times}${away ? `, ${seconds(away)} of it away` : ""}.`;
}

function slots(run, width) {
  const one = run.pass;
  if (!one || !one.slots.length) return null;
  const left = Math.min(230, width * 0.36);
  const device = deviceOf(run), budget = device && device.budget_bytes;
  const readout = make("div", { class: "readout", id: `slot-${RUNS.indexOf(run)}`, "aria-live": "polite" }, "Point at a bar, or go to one with Tab and the arrow keys.");
  const drawn = one.levels.t_s.length ? passLevels(run, width, left, budget) : null;
  const height = ROW * one.slots.length + 6;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": `Bars of ${one.slots.length} slots` });
  const x = (s) => left + (width - left - RIGHT) * (one.length_s ? s / one.length_s : 0);
  svg.append(make("line", { class: "cursor", x1: x(one.forward_s), x2: x(one.forward_s), y1: 0, y2: height, "stroke-dasharray": "2 3" }));
  const groups = one.slots.map((slot, n) => bar(slot, n, x, left, width));
  groups.forEach((group, n) => {
    const say = () => { readout.textContent = told(one.slots[n]); };
    group.addEventListener("mouseenter", say);
    group.addEventListener("focus", say);
    group.addEventListener("keydown", (event) => {
      const next = { ArrowDown: n + 1, ArrowUp: n - 1, Home: 0, End: groups.length - 1 }[event.key];
      if (groups[next]) { event.preventDefault(); groups[next].focus(); }
    });
  });
  svg.append(...groups);
  const used = new Set(one.slots.flatMap((slot) => slot.parts.map(([stage]) => stage)));
  const names = { held: "in memory", write: "written", copy_out: "copied out", away: "away", read: "read", copy_in: "copied in", recompute: "recomputed" };
  return [
    make("p", {}, `${one.name}, the last one in the log: ${seconds(one.length_s)} from ${seconds(one.at_s)} on. Forward ends at the dotted line. `
      + `${one.slots.length} slots${one.left_out ? `; ${one.left_out} smaller ones are left out` : ""}.`),
    drawn, legend(Object.entries(names).filter(([stage]) => used.has(stage)).map(([stage, name]) => [name, FILLS[stage]])),
    readout, make("div", { class: "slots" }, svg),
    one.slots.some((slot) => !slot.measured) ? make("p", { class: "faint" }, "A slot that stays has no times of its own in the log; its bar has those of the profiled pass, fitted to this one.") : null,
    more("slots as a table", table("Slots in the order of saving", ["slot", ["bytes", "number"], "module", "action", ["saved at", "number"], ["away for", "number"], ["reason", "long"]],
      one.slots.map((slot) => [slot.slot, [bytes(slot.nbytes), slot.nbytes], slot.module_kind, [slot.action, slot.tier].filter(Boolean).join(" → "), seconds(slot.parts[0][1]),
        seconds(slot.parts.filter(([stage]) => stage === "away").reduce((total, [, from, to]) => total + to - from, 0)), slot.reason]))),
  ];
}

function bar(slot, n, x, left, width) {
  const y = n * ROW + 3;
  const group = make("g", { class: "slot", tabindex: n ? -1 : 0, role: "img", "aria-label": told(slot), "data-slot": slot.slot, "data-action": slot.action, "data-value": slot.nbytes }, make("title", {}, told(slot)));
  group.append(make("rect", { x: 0, y: y - 2, width, height: ROW, fill: "transparent" }));
  const room = Math.floor(left / 6.6);
  const name = slot.slot.length > room ? `…${slot.slot.slice(1 - room)}` : slot.slot;
  group.append(make("text", { class: "name", x: left - 8, y: y + 10, "text-anchor": "end" }, name));
  for (const [stage, from, to] of slot.parts) {
    const thin = stage === "away";
    group.append(make("rect", { class: stage, x: x(from), width: Math.max(1, x(to) - x(from)), y: thin ? y + 4 : y, height: thin ? 5 : 13, fill: FILLS[stage] || colour(6), "fill-opacity": slot.measured ? 1 : 0.6 }));
  }
  return group;
}

// The level of the device's memory in the pass, on the time axis of the bars below it.
function passLevels(run, width, left, budget) {
  const { levels, length_s: lengthS } = run.pass;
  const peak = highestOf(levels.nbytes), limit = budget && budget < 4 * peak ? budget : 0;
  const made = axes({ width, height: 120, lengthS, top: 1.15 * Math.max(peak, limit), show: bytes, base: 2, left, label: `Device memory in the pass, at most ${bytes(peak)}. Arrow keys read it out.` });
  const { svg, x, y } = made;
  const ends = [...levels.t_s.slice(1), lengthS];
  const line = levels.nbytes.map((value, k) => `${k ? "L" : "M"}${x(levels.t_s[k])} ${y(value)}H${x(ends[k])}`).join("");
  svg.append(make("path", { d: `${line}L${x(lengthS)} ${y(0)}H${x(0)}Z`, fill: colour(0), "fill-opacity": 0.15 }));
  svg.append(make("path", { d: line, fill: "none", stroke: colour(0), "stroke-width": 1.5 }));
  if (limit) {
    svg.append(make("line", { class: "budget", x1: x(0), x2: x(lengthS), y1: y(limit), y2: y(limit) }));
    svg.append(make("text", { class: "over", x: x(lengthS) - 4, y: y(limit) - 4, "text-anchor": "end" }, `budget ${bytes(limit)}`));
  }
  const readout = make("div", { class: "readout", "aria-live": "polite" });
  const at = (s) => Math.max(0, levels.t_s.findLastIndex((t) => t <= s));
  readable(svg, made, levels.t_s.length, (k) => x(levels.t_s[k]), readout, (k) => `${seconds(levels.t_s[k])}: ${bytes(levels.nbytes[k])}`, at, lengthS);
  return make("figure", { "data-pass": run.pass.name }, svg, readout);
}

head();
section("memory", "Memory over time", `The highest level in each of ${RUNS[0].memories[0] ? RUNS[0].memories[0].highest.length : 0} equal parts of the run. "device" is what autograd has saved: in host memory on a CPU.`, memory);
section("owners", "Host memory by owner", "What Penstock held in this process, one owner above the other. The log has five samples a second, and every change of saved tensors.", owners);
section("process", "The whole process", "Memory that is no page of a file. The program's own tensors are as large as at the end of the first step; work space, Python and its libraries are in the rest.", whole);
section("link", "Use of the link and of flash", "Mean rate in each part of the run; all pictures have the same scale.", link);
section("stalls", "Waits of training", "How much of each part of the run the training thread waited for Penstock, by cause.", stalls);
section("steps", "Steps", "From one end of an optimizer step to the next.", steps);
section("slots", "The life of every slot", "A slot is a tensor that a module saves for backward: in memory, on its way to flash or host memory, away, and back.", slots);
section("plan", "What the plan decided", "The reasons are those of the plan in force at the end.", decisions);
section("prediction", "Predicted beside measured", "The prediction is a replay of the plan, made when it came into force.", predicted);
section("wear", "Wear of the SSD", "All that Penstock has written to flash, by what wrote it.", wear);
document.documentElement.dataset.drawn = String(document.querySelectorAll("svg").length);
let timer = 0;
window.addEventListener("resize", () => {
  clearTimeout(timer);
  timer = setTimeout(() => redrawn.forEach((fill) => fill()), 150);
});
