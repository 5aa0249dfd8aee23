"use strict";
// Everything from the data becomes text or an attribute, never markup.

const element = (id) => document.getElementById(id);
const data = JSON.parse(element("data").textContent);
const pairs = new Map(data.pairs.map((pair) => [pair.id, pair]));
const STORE = `sd-quant votes ${data.page}`;
const ZOOMS = [1, 2, 4];
const SMALL_EDGE = 256; // images up to it are enlarged pixel by pixel
const KEYS = {
  1: "first", ArrowLeft: "first", 2: "second", ArrowRight: "second", 0: "neither", " ": "neither",
};

// A voter's session: the order and the sides, drawn once, and the votes so far.

const random = (below) => crypto.getRandomValues(new Uint32Array(1))[0] % below;

function shuffled(list) {
  for (let last = list.length - 1; last > 0; last--) {
    const other = random(last + 1);
    [list[last], list[other]] = [list[other], list[last]];
  }
  return list;
}

function begun(voter) {
  const bytes = [...crypto.getRandomValues(new Uint8Array(8))];
  return {
    session: bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(""),
    voter: voter.replace(/\p{Cs}/gu, "").trim(),
    order: shuffled([...pairs.values()]).map(({ id, images }) => ({ pair: id, first: images[random(2)].id })),
    votes: [],
  };
}

let session = null;
let shownAt = null; // when both images were there to be seen; null before
let zoom = 1;

function keep() {
  try {
    localStorage.setItem(STORE, JSON.stringify(session));
  } catch {
    element("told").textContent = "This browser keeps nothing: save your votes before you close the page.";
  }
}

function kept() {
  try {
    const found = JSON.parse(localStorage.getItem(STORE));
    return found?.order.every(({ pair }) => pairs.has(pair)) ? found : null;
  } catch {
    return null;
  }
}

// The file. The checksum tells a file that was changed afterwards by mistake, not one that was forged.

function crc32(text) {
  let crc = -1;
  for (const byte of new TextEncoder().encode(text)) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (0xedb88320 & -(crc & 1));
  }
  return (~crc >>> 0).toString(16).padStart(8, "0");
}

function save() {
  const { session: name, voter, votes } = session;
  const lines = votes.map(({ pair, first, answer, ms }) => [pair, first, answer, ms].join(" "));
  const checksum = crc32([data.page, name, voter, ...lines].join("\n"));
  const content = { format: "sd-quant votes 1", page: data.page, session: name, voter, votes, checksum };
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`${JSON.stringify(content, null, 1)}\n`], { type: "application/json" }));
  link.download = `votes-${[data.page.slice(0, 8), voter.replace(/[^A-Za-z0-9]+/g, ""), name.slice(0, 6)].filter(Boolean).join("-")}.json`;
  link.click();
  element("told").textContent = `Saved as ${link.download}.`;
}

// Showing a pair and taking its answer.

function setZoom(factor, x = 50, y = 50) {
  zoom = factor;
  const style = element("pair").style;
  style.setProperty("--zoom", factor);
  style.setProperty("--x", `${x}%`);
  style.setProperty("--y", `${y}%`);
  element("pair").classList.toggle("zoomed", factor > 1);
  element("zoom").firstChild.data = `Zoom ${factor}× `;
}

async function show() {
  const { order, votes } = session;
  const place = votes.length;
  const done = place === order.length;
  element("start").hidden = true;
  element("tools").hidden = false;
  element("voting").hidden = element("zoom").hidden = done;
  element("end").hidden = element("anew").hidden = !done;
  element("undo").disabled = element("save").disabled = !place;
  element("save").classList.toggle("main", done);
  shownAt = null;
  if (done) return;
  element("bar").value = place;
  element("count").textContent = `${place + 1} of ${order.length}`;
  const pair = pairs.get(order[place].pair);
  const [first, second] = [...pair.images].sort((a, b) => (b.id === order[place].first) - (a.id === order[place].first));
  element("prompt").textContent = pair.text;
  element("pair").style.setProperty("--shape", pair.width / pair.height);
  setZoom(1);
  for (const [id, image] of [["first", first], ["second", second]]) {
    const place = element(id);
    Object.assign(place, { src: image.source, width: pair.width, height: pair.height });
    place.classList.toggle("pixels", Math.max(pair.width, pair.height) <= SMALL_EDGE);
  }
  await Promise.allSettled([element("first").decode(), element("second").decode()]);
  if (session.votes.length === place) shownAt = performance.now();
}

function answer(which) {
  if (shownAt === null) return;
  const { pair, first } = session.order[session.votes.length];
  session.votes.push({ pair, first, answer: which, ms: Math.round(performance.now() - shownAt) });
  element("told").textContent = "";
  keep();
  show();
}

function undo() {
  if (!session?.votes.pop()) return;
  element("told").textContent = "";
  keep();
  show();
}

function pan(event) {
  const box = event.currentTarget.getBoundingClientRect();
  const share = (at, start, size) => Math.min(100, Math.max(0, (100 * (at - start)) / size));
  setZoom(zoom, share(event.clientX, box.left, box.width), share(event.clientY, box.top, box.height));
}

const nextZoom = () => ZOOMS[(ZOOMS.indexOf(zoom) + 1) % ZOOMS.length];

element("begin").addEventListener("click", () => {
  session ??= begun(element("voter").value);
  keep();
  show();
});
element("voter").addEventListener("keydown", (event) => {
  if (event.key === "Enter") element("begin").click();
});
for (const button of document.querySelectorAll("[data-answer]")) {
  button.addEventListener("click", () => answer(button.dataset.answer));
}
element("undo").addEventListener("click", undo);
element("zoom").addEventListener("click", () => setZoom(nextZoom()));
element("save").addEventListener("click", save);
element("anew").addEventListener("click", () => {
  if (!confirm("Remove these votes from this browser? Save them first.")) return;
  localStorage.removeItem(STORE);
  location.reload();
});
for (const view of document.querySelectorAll(".view")) {
  view.addEventListener("click", (event) => {
    if (zoom === 1) zoom = 2;
    pan(event);
  });
  view.addEventListener("pointermove", (event) => {
    if (zoom > 1) pan(event);
  });
}
document.addEventListener("click", (event) => {
  if (event.detail) document.activeElement.blur(); // else space would press the button again that the mouse has pressed
});
document.addEventListener("keydown", (event) => {
  if (!element("start").hidden || event.repeat || event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === " " && event.target.tagName === "BUTTON") return; // reached with tab
  if (event.key in KEYS) answer(KEYS[event.key]);
  else if (event.key === "Backspace") undo();
  else if (event.key === "z") setZoom(nextZoom());
  else return;
  event.preventDefault();
});

session = kept();
if (session) {
  element("voter").value = session.voter;
  element("voter").disabled = true;
  element("begin").textContent = "Continue";
  element("kept").textContent = `${session.votes.length} of ${session.order.length} votes are kept here.`;
}
