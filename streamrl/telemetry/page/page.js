// The page of one or several runs. Data of the runs enters it as text nodes and as Plotly's data;
// hover texts are escaped by the program that makes them.
let page = JSON.parse(document.getElementById("data").textContent);
const query = new URLSearchParams(location.search);
const isServed = location.protocol === "http:";
const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
const INK = isDark ? "#ddd" : "#222", GRID = isDark ? "#444" : "#e4e4e4";
const BASE_LAYOUT = {
  height: 300, margin: { l: 64, r: 20, t: 8, b: 44 }, hovermode: "closest",
  paper_bgcolor: "transparent", plot_bgcolor: "transparent",
  font: { color: INK, size: 12, family: "system-ui, sans-serif" },
  modebar: { bgcolor: "transparent", color: "#8889", activecolor: INK },
  legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
};
const PLOT_CONFIG = { responsive: true, displaylogo: false, displayModeBar: "hover",
                      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
let stepRange = null;  // zoom of all charts over steps
let isZooming = false;
let isUnanswered = false;

const styleAxis = (axis) => ({ gridcolor: GRID, zerolinecolor: GRID, ...axis });

function layOut(chart) {
  const layout = { ...BASE_LAYOUT, ...chart.layout, uirevision: chart.chart_id };
  const xaxis = { title: { text: "training step" } };
  layout.xaxis = styleAxis({ ...xaxis, ...chart.layout.xaxis });
  layout.yaxis = styleAxis({ automargin: true, ...chart.layout.yaxis });
  if (stepRange) layout.xaxis.range = stepRange;
  return layout;
}

let waiting = [];  // charts below the window: [box, chart], drawn one by one
let isDrawing = false;

// Draw the charts in view, and let those below wait for drawWaiting.
function drawCharts(container, charts) {
  const wanted = new Set(charts.map((chart) => chart.chart_id));
  for (const box of Array.from(container.children)) if (!wanted.has(box.dataset.chart)) box.remove();
  // All boxes first: a plot takes the width that its box has when it is drawn.
  const boxes = charts.map((chart) => findBox(container, chart));
  boxes.forEach((box, i) => {
    if (container.children[i] !== box) container.insertBefore(box, container.children[i]);
  });
  charts.forEach((chart, i) => {
    if (boxes[i].getBoundingClientRect().top < innerHeight) drawChart(boxes[i], chart);
    else waiting.push([boxes[i], chart]);
  });
}

function drawChart(box, chart) {
  const plot = box.lastChild, isFirst = !plot.data;
  box.firstChild.textContent = chart.title;
  Plotly.react(plot, chart.traces, layOut(chart), PLOT_CONFIG);
  if (isFirst) plot.on("plotly_relayout", (change) => zoomAll(plot, change));
}

function drawWaiting() {
  const next = waiting.shift();
  isDrawing = Boolean(next);
  if (next) { drawChart(...next); setTimeout(drawWaiting); }
  else if (!document.body.dataset.drawn) {
    document.body.dataset.drawn = "true";
    performance.mark("charts drawn");
  }
}

function findBox(container, chart) {
  const known = Array.from(container.children).find((child) => child.dataset.chart === chart.chart_id);
  if (known) return known;
  const box = make("article", "chart");
  box.dataset.chart = chart.chart_id;
  if (chart.chart_id === "events") box.classList.add("wide");
  box.append(make("h3", "", chart.title), make("p", "caption", chart.caption), make("div", "plot"));
  // The height that it will have: charts in view are told from those below before they are drawn.
  box.lastChild.style.minHeight = `${chart.layout.height ?? BASE_LAYOUT.height}px`;
  container.append(box);
  return box;
}

function zoomAll(source, change) {
  if (isZooming) return;
  if (change["xaxis.autorange"]) stepRange = null;
  else if (change["xaxis.range[0]"] !== undefined)
    stepRange = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  else return;
  isZooming = true;
  const update = stepRange ? { "xaxis.range": stepRange.slice() } : { "xaxis.autorange": true };
  const others = Array.from(document.querySelectorAll(".chart .plot"))
    .filter((plot) => plot !== source && plot.data);
  Promise.all(others.map((plot) => Plotly.relayout(plot, update)))
    .finally(() => { isZooming = false; });
}

const chosenRun = () => page.runs.find((run) => run.name === control("run").value) ?? page.runs[0];

// A text that stays the same keeps its selection.
function setText(id, text) {
  if (control(id).textContent !== text) control(id).textContent = text;
}

function drawRun() {
  const run = chosenRun();
  control("tiles").replaceChildren(...run.tiles.map(({ label, value }) => {
    const tile = make("div", "tile");
    tile.append(make("b", "", value), make("span", "", label));
    return tile;
  }));
  control("state").textContent = run.state;
  control("run-title").textContent = page.runs.length > 1 ? run.name : "";
  drawCharts(control("run-charts"), run.charts);
  setText("advice-text", run.advice.join("\n"));
  setText("config-text", run.config);
  control("rollouts-note").textContent = run.rolloutsNote;
  const steps = control("step"), wanted = steps.value;
  steps.replaceChildren(...run.rolloutSteps.map((step) => {
    const option = make("option", "", step);
    option.value = step;
    return option;
  }));
  const isKnown = run.rolloutSteps.map(String).includes(wanted);
  if (run.rolloutSteps.length) steps.value = isKnown ? wanted : run.rolloutSteps.at(-1);
  control("bar").hidden = !run.rolloutSteps.length;
}

async function drawRollouts() {
  const run = chosenRun(), step = control("step").value;
  if (step === "") { showGroups([]); return; }
  let groups = run.rollouts[step];
  if (!groups && isServed) {
    const address = `rollouts?${new URLSearchParams({ token: query.get("token"), run: run.name, step })}`;
    const reply = await fetch(address);
    groups = reply.ok ? (await reply.json()).groups : [];
  }
  showGroups(groups ?? []);
  paintTokens();
}

function moveStep(distance) {
  const steps = control("step");
  const index = steps.selectedIndex + distance;
  if (index < 0 || index >= steps.options.length) return;
  steps.selectedIndex = index;
  drawRollouts();
}

function drawPage() {
  waiting = [];
  control("title").textContent = page.title;
  document.title = `${page.title} - streamrl`;
  const chooser = control("run"), wanted = chooser.value;
  chooser.replaceChildren(...page.runs.map((run) => {
    const option = make("option", "", run.name);
    option.value = run.name;
    return option;
  }));
  if (page.runs.some((run) => run.name === wanted)) chooser.value = wanted;
  control("chooser").hidden = page.runs.length < 2;
  drawCharts(control("shared-charts"), page.charts);
  drawRun();
  if (!isDrawing) drawWaiting();
}

async function follow() {
  try {
    const known = new URLSearchParams({ token: query.get("token"), state: page.state ?? "" });
    const reply = await fetch(`data?${known}`);
    if (!reply.ok) throw new Error(await reply.text());
    if (reply.status !== 204) {  // 204: the runs have written nothing since
      const isOpen = control("step").selectedIndex === control("step").options.length - 1;
      page = await reply.json();
      drawPage();
      if (!control("groups").children.length && isOpen) drawRollouts();
    } else if (isUnanswered) drawRun();
    isUnanswered = false;
  } catch (error) {
    isUnanswered = true;
    control("state").textContent = `no answer, trying again: ${error.message}`;
  }
  setTimeout(follow, page.followEvery * 1000);
}

control("run").addEventListener("input", () => { drawPage(); drawRollouts(); });
control("step").addEventListener("input", drawRollouts);
control("earlier").addEventListener("click", () => moveStep(-1));
control("later").addEventListener("click", () => moveStep(1));
drawPage();
drawRollouts();
if (isServed && page.followEvery) setTimeout(follow, page.followEvery * 1000);
document.body.dataset.ready = "true";
performance.mark("page ready");
