"use strict";
// Everything from the data becomes text or an attribute, never markup.

const element = (id) => document.getElementById(id);
const make = (tag, properties, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};

// The table: rows without a value stay last in both orders.

const body = document.querySelector("#results tbody");
const headers = [...document.querySelectorAll("#results thead th")];

function valueOf(row, column) {
  const cell = row.cells[column];
  if (!cell) return null;
  const text = cell.tagName === "TH" ? cell.textContent.trim() : cell.dataset.value;
  if (text === undefined) return null;
  const number = Number(text);
  return Number.isNaN(number) ? text : number;
}

function compare(a, b) {
  const numbers = (typeof a === "number") + (typeof b === "number");
  if (numbers === 2) return a === b ? 0 : a - b; // two infinities have no difference
  if (numbers === 1) return typeof a === "number" ? -1 : 1; // alpha=auto comes after all numbers
  return a.localeCompare(String(b), "en", { numeric: true });
}

headers.forEach((header, column) => {
  header.querySelector("button").addEventListener("click", () => {
    const other = { ascending: "descending", descending: "ascending" };
    const order = other[header.ariaSort] ?? header.dataset.first;
    headers.forEach((each) => (each.ariaSort = each === header ? order : "none"));
    const sign = order === "ascending" ? 1 : -1;
    const rows = [...body.rows].sort((first, second) => {
      const [a, b] = [valueOf(first, column), valueOf(second, column)];
      if (a === null || b === null) return (a === null) - (b === null);
      return sign * compare(a, b);
    });
    body.append(...rows);
  });
});

element("filter").addEventListener("input", (event) => {
  const wanted = event.target.value.trim().toLowerCase();
  let count = 0;
  for (const row of body.rows) {
    row.hidden = !row.textContent.toLowerCase().includes(wanted);
    count += !row.hidden;
  }
  element("count").textContent = wanted ? `${count} of ${body.rows.length}` : "";
});

for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.previousElementSibling.textContent);
    button.textContent = "Copied";
  });
}

// The images: a gallery of pairs, worst first, and the viewer, in which the two of a pair lie over each other.

const data = JSON.parse(element("data").textContent);
const ALL = "all";
const stage = element("stage");
const split = element("split");
const select = element("recipe");
let list = []; // the pairs of the gallery, in its order: {prompt, pair}
let current = 0;

const closeness = (pair) => pair.psnr ?? Infinity;

function show(place, index, alt) {
  const image = data.images[index];
  place.hidden = !image;
  if (!image) return place;
  Object.assign(place, { src: image.source, alt, width: image.width, height: image.height });
  place.classList.toggle("pixels", !image.reduced);
  return place;
}

function showBoth() {
  stage.dataset.shown = "both";
  stage.style.setProperty("--split", `${split.value}%`);
  element("shown").textContent = "full precision on the left, quantized on the right";
}

function flip() {
  if (split.disabled) return;
  stage.dataset.shown = stage.dataset.shown === "full" ? "quantized" : "full";
  element("shown").textContent = stage.dataset.shown === "full" ? "full precision" : "quantized";
}

function view(place) {
  const { prompt, pair } = list[place];
  const whole = data.images[pair.full] && data.images[pair.quantized];
  if (whole && split.disabled) showBoth();
  if (!whole) {
    stage.dataset.shown = data.images[pair.full] ? "full" : "quantized";
    element("shown").textContent = data.images[pair.full] ? "no quantized image" : "no full precision image";
  }
  element("flip").disabled = split.disabled = !whole;
  current = place;
  show(element("full"), pair.full, `${prompt.text}, full precision`);
  show(element("quantized"), pair.quantized, `${prompt.text}, quantized`);
  element("prompt").textContent = prompt.text;
  element("scores").textContent = `${data.recipes[pair.recipe].name}: ${pair.scores}`;
  element("previous").disabled = place === 0;
  element("next").disabled = place === list.length - 1;
  for (const [index, button] of document.querySelectorAll("#gallery button").entries()) {
    button.ariaCurrent = String(index === place);
  }
}

function pairButton(prompt, pair, place, several) {
  const half = (index, variant) =>
    data.images[index]
      ? show(make("img"), index, `${prompt.text}, ${variant}`)
      : make("span", { className: "absent" }, `no ${variant} image`);
  const name = several ? [make("span", { className: "name" }, data.recipes[pair.recipe].name)] : [];
  const button = make(
    "button",
    { type: "button", className: "pair" },
    half(pair.full, "full precision"),
    half(pair.quantized, "quantized"),
    ...name,
    make("span", { className: "scores" }, pair.scores),
  );
  button.addEventListener("click", () => {
    if (several) {
      select.value = pair.recipe;
      fill();
    }
    view(several ? list.findIndex((item) => item.pair === pair) : place);
    element("viewer").scrollIntoView({ block: "nearest" });
    split.focus({ preventScroll: true });
  });
  return button;
}

function fill() {
  const wanted = select.value;
  const several = wanted === ALL;
  const chosen = data.prompts
    .map((prompt) => ({ prompt, pairs: prompt.pairs.filter((pair) => several || pair.recipe === Number(wanted)) }))
    .filter(({ pairs }) => pairs.length)
    .map((item) => ({ ...item, worst: Math.min(...item.pairs.map(closeness)) }))
    .sort((a, b) => compare(a.worst, b.worst));
  list = [];
  const cards = chosen.map(({ prompt, pairs }) => {
    const buttons = pairs.map((pair) => pairButton(prompt, pair, list.push({ prompt, pair }) - 1, several));
    return make("figure", {}, make("div", { className: "pairs" }, ...buttons), make("figcaption", {}, prompt.text));
  });
  element("gallery").replaceChildren(...cards);
  element("gallery").classList.toggle("several", several);
  element("viewer").hidden = several;
  view(0);
}

function drag(event) {
  const box = stage.getBoundingClientRect();
  split.value = (100 * (event.clientX - box.left)) / box.width;
  showBoth();
}

if (data.prompts.length) {
  data.recipes.forEach((recipe, index) => {
    if (!data.prompts.some((prompt) => prompt.pairs.some((pair) => pair.recipe === index))) return;
    const text = recipe.badge ? `${recipe.name} (${recipe.badge})` : recipe.name;
    select.append(make("option", { value: index, selected: recipe.first }, text));
  });
  if (select.options.length > 1) select.append(make("option", { value: ALL }, "all recipes, side by side"));
  select.addEventListener("change", fill);
  split.addEventListener("input", showBoth);
  element("flip").addEventListener("click", flip);
  element("previous").addEventListener("click", () => view(current - 1));
  element("next").addEventListener("click", () => view(current + 1));
  stage.addEventListener("pointerdown", (event) => {
    event.preventDefault(); // no dragging of the image itself
    if (split.disabled) return;
    split.focus({ preventScroll: true });
    stage.setPointerCapture(event.pointerId);
    drag(event);
  });
  stage.addEventListener("pointermove", (event) => {
    if (stage.hasPointerCapture(event.pointerId)) drag(event);
  });
  element("viewer").addEventListener("keydown", (event) => {
    if (event.key !== " " || event.target.tagName === "BUTTON") return; // a button flips or moves by itself
    event.preventDefault();
    flip();
  });
  showBoth();
  fill();
}
