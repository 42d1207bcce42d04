// Recorded rollouts, drawn token by token: showGroups(groups) fills the element "groups".
// Text from a run enters the page only as text nodes and attributes, never as markup.
const control = (id) => document.getElementById(id);
const HUES = { prompt: 220, sampled: 150, scaffold: 0, observation: 40 };
const FULL_LOGPROB = 6;  // color is full where the logprob is -6 or lower
let shownGroups = [], boxes = [], oldest = 0, newest = 0, maxRelative = 1, maxAdvantage = 1;
const listRollouts = () => shownGroups.flatMap((group) => group.rollouts);

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

const show = (number) => (number === null || number === undefined ? "none" : +number.toPrecision(3));
const showSigned = (number) => (number > 0 ? "+" : "") + show(number);

// Tokens of a turn: first those with a logprob, then the rest of the text as one.
function listTokens(turn, rollout) {
  const characters = Array.from(turn.text);  // by code point, as piece_lengths counts
  const perToken = (turn.versions || []).flatMap(([version, count]) => Array(count).fill(version));
  const shared = { source: turn.source, relative: rollout.relative_score,
                   advantage: rollout.advantage };
  const scores = new Map(turn.scores || []);
  let start = 0;
  const tokens = (turn.piece_lengths || []).map((length, i) => ({
    ...shared,
    text: characters.slice(start, (start += length)).join(""),
    version: perToken[i],
    logprob: turn.logprobs[i],
    score: scores.get(i),
  }));
  const rest = characters.slice(start).join("");
  const version = new Set(perToken).size === 1 ? perToken[0] : undefined;
  return rest ? [...tokens, { ...shared, text: rest, version }] : tokens;
}

function chooseColor(token, mode) {
  const isSampled = token.source === "sampled";
  const tint = (hue, strength) => `hsl(${hue} 80% 50% / ${(0.5 * strength).toFixed(3)})`;
  if (mode === "source") return token.source === "scaffold" ? "#8883" : tint(HUES[token.source], 0.5);
  if (!isSampled) return "transparent";
  if (mode === "version" && token.version !== undefined)
    return tint(200 + 160 * (token.version - oldest) / Math.max(1, newest - oldest), 0.7);
  if (mode === "logprob" && typeof token.logprob === "number")
    return tint(0, Math.min(1, -token.logprob / FULL_LOGPROB));
  if (mode === "relative" && typeof token.relative === "number")
    return tint(token.relative > 0 ? 130 : 0, Math.abs(token.relative) / maxRelative);
  if (mode === "score" && token.score !== undefined) return tint(token.score > 0 ? 130 : 0, 1);
  if (mode === "advantage" && typeof token.advantage === "number")
    return tint(token.advantage > 0 ? 130 : 0, Math.abs(token.advantage) / maxAdvantage);
  return "transparent";
}

function describeToken(token) {
  const lines = [JSON.stringify(token.text), token.source];
  if (token.version !== undefined) lines.push(`version ${token.version}`);
  if (typeof token.logprob === "number")
    lines.push(`logprob ${token.logprob} (probability ${show(Math.exp(token.logprob))})`);
  if (token.score !== undefined) lines.push(`score ${showSigned(token.score)} falls here`);
  if (token.source === "sampled") lines.push(`relative score ${showSigned(token.relative)}`);
  if (token.source === "sampled" && typeof token.advantage === "number")
    lines.push(`advantage ${showSigned(token.advantage)}`);
  return lines.join("\n");
}

function drawTurn(turn, rollout) {
  const box = make("details", "turn");
  box.open = turn.source !== "prompt";
  const facts = [turn.source];
  if (turn.tokens !== undefined) facts.push(`${turn.tokens} tokens`);
  if (turn.outcome) facts.push(turn.outcome);
  if (turn.reward !== undefined) facts.push(`reward ${show(turn.reward)}`);
  if (turn.scores)
    facts.push(`score ${show(turn.scores.reduce((sum, [, score]) => sum + score, 0))}`);
  box.append(make("summary", "", facts.join(", ")));
  const text = make("pre");
  for (const token of listTokens(turn, rollout)) {
    const span = make("span", "token", token.text);
    span.title = describeToken(token);
    span.token = token;
    text.append(span);
  }
  box.append(text);
  return box;
}

function drawRollout(rollout, number) {
  const box = make("section", "rollout");
  box.append(make("b", "", `${number}. score ${show(rollout.score)}`));
  const facts = [`relative score ${showSigned(rollout.relative_score)}`];
  if (typeof rollout.advantage === "number") facts.push(`advantage ${showSigned(rollout.advantage)}`);
  if (typeof rollout.tokens === "number") facts.push(`${rollout.tokens} tokens`);
  for (const [name, score] of Object.entries(rollout.components))
    facts.push(`${name} ${show(score)} (${rollout.verdicts[name] ?? "no verdict"})`);
  if (rollout.environment_score !== null)
    facts.push(`environment score ${show(rollout.environment_score)}`);
  if (rollout.finish_reason) facts.push(`finish reason ${rollout.finish_reason}`);
  box.append(make("div", "facts", facts.join(", ")));
  const turns = rollout.turns.length
    ? rollout.turns : [{ source: "sampled", text: rollout.completion }];
  box.append(...turns.map((turn) => drawTurn(turn, rollout)));
  return box;
}

function drawGroup(group) {
  const box = make("details", "group");
  const size = `${group.rollouts.length} rollouts, mean score ${show(group.mean_score)}`;
  const environment = group.environment ? `, environment ${group.environment}` : "";
  box.append(make("summary", "", `step ${group.step}, uid ${group.uid}${environment}: ${size}`));
  const isDrawn = () => box.lastChild.className === "siblings";
  box.draw = () => {  // thousands of tokens: only when the group is opened
    if (isDrawn()) return;
    const lines = group.prompt.map((m) => `${m.role}: ${
      typeof m.content === "string" ? m.content : JSON.stringify(m.content)}`);
    if (group.ground_truth !== null && group.ground_truth !== "")
      lines.push(`ground truth: ${
        typeof group.ground_truth === "string"
          ? group.ground_truth : JSON.stringify(group.ground_truth)}`);
    const siblings = make("div", "siblings");
    siblings.append(...group.rollouts.map((rollout, i) => drawRollout(rollout, i + 1)));
    box.append(make("pre", "", lines.join("\n")), siblings);
    filterRollouts();
    paintTokens();
  };
  box.siblings = () => (isDrawn() ? Array.from(box.lastChild.children) : []);
  box.addEventListener("toggle", () => box.open && box.draw());
  return box;
}

function listOutcomes(rollout) {
  const outcomes = Object.values(rollout.verdicts).map((verdict) => `verdict ${verdict}`);
  if (rollout.finish_reason) outcomes.push(`finish reason ${rollout.finish_reason}`);
  for (const turn of rollout.turns) if (turn.outcome) outcomes.push(`turn ${turn.outcome}`);
  return outcomes;
}

function isWanted(rollout) {
  const [outcome, lowest, highest] = ["outcome", "lowest", "highest"].map((id) => control(id).value);
  return (!outcome || listOutcomes(rollout).includes(outcome))
    && (lowest === "" || (rollout.score !== null && rollout.score >= +lowest))
    && (highest === "" || (rollout.score !== null && rollout.score <= +highest));
}

function filterRollouts() {
  let shown = 0;
  shownGroups.forEach((group, i) => {
    const wanted = group.rollouts.map(isWanted);
    boxes[i].siblings().forEach((box, j) => { box.hidden = !wanted[j]; });
    boxes[i].hidden = !wanted.includes(true);
    shown += wanted.filter(Boolean).length;
  });
  control("shown").textContent = `${shown} of ${listRollouts().length} rollouts`;
}

function paintTokens() {
  const mode = control("mode").value;
  for (const span of document.querySelectorAll(".token"))
    span.style.background = chooseColor(span.token, mode);
}

function showGroups(groups) {
  shownGroups = groups;
  const rollouts = listRollouts();
  const versions = rollouts.flatMap((r) => r.turns)
    .flatMap((turn) => (turn.versions || []).map(([version]) => version));
  oldest = versions.reduce((a, b) => Math.min(a, b), Infinity);
  newest = versions.reduce((a, b) => Math.max(a, b), -Infinity);
  const findLargest = (name) => rollouts.reduce((a, r) => Math.max(a, Math.abs(r[name] ?? 0)), 0) || 1;
  maxRelative = findLargest("relative_score");
  maxAdvantage = findLargest("advantage");
  const chosen = control("outcome").value;
  const outcomes = [...new Set(rollouts.flatMap(listOutcomes))].sort();
  control("outcome").replaceChildren(...["", ...outcomes].map((outcome) => {
    const option = make("option", "", outcome || "all");
    option.value = outcome;
    return option;
  }));
  control("outcome").value = outcomes.includes(chosen) ? chosen : "";
  boxes = shownGroups.map(drawGroup);
  control("groups").replaceChildren(...boxes);
  if (boxes.length) { boxes[0].open = true; boxes[0].draw(); }
  filterRollouts();
}

for (const id of ["outcome", "lowest", "highest"])
  control(id).addEventListener("input", filterRollouts);
control("mode").addEventListener("input", paintTokens);
