"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const LIVE = DATA.mode === "live";
const POLL_MS = 3000, ROW = 69, PROMPT_TAIL = 60;
const $ = (id) => document.getElementById(id);
const state = { run: null, chosen: "", metrics: [], generation: 0, listed: "", complete: true, counted: 0, problems: [], open: null, seen: "", failure: "",
  summary: { splits: [], steps: [], outcomes: [], causes: [], trees: false, tasks: false, tables: [], curves: [], branches: { traces: 0, looked_at: 0, counts: {} } } };

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
function svg(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
function fmt(value) {
  if (!isNumber(value)) return value === null || value === undefined ? "–" : String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
}
function duration(seconds) {
  const total = Math.round(seconds), h = Math.floor(total / 3600), m = Math.floor(total / 60) % 60, s = total % 60;
  return h ? `${h} h ${m} min` : m ? `${m} min ${s} s` : `${s} s`;
}
const sum = (rows, name) => rows.reduce((total, row) => total + (isNumber(row[name]) ? row[name] : 0), 0);

function table(head, rows) {
  return el("table", {}, el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", { class: "num" }, cell))))));
}

/* Replaces what is in a node; its tables stay scrolled to where they were. */
function refill(node, ...children) {
  const boxes = () => [...node.querySelectorAll(".scroll")], at = boxes().map((box) => box.scrollLeft);
  node.replaceChildren(...children);
  boxes().forEach((box, k) => { box.scrollLeft = at[k] ?? 0; });
}

/* Renders what is new without moving what is read: the lowest part that begins in the upper half of the window. */
function steady(render) {
  const top = (node) => node.getBoundingClientRect().top;
  const read = scrollY ? [...document.querySelectorAll("main > *, .charts, .tables, .browser, #detail > *")].filter((node) => node.offsetParent && top(node) <= innerHeight / 2).sort((a, b) => top(a) - top(b)).pop() : null;
  const before = read && top(read);
  render();
  if (read?.isConnected) scrollBy(0, top(read) - before);
}

/* ---- tooltip ---- */
function tip(text, x, y) {
  const node = $("tip");
  node.hidden = !text;
  if (!text) return;
  node.textContent = text;
  node.style.left = Math.max(4, Math.min(x + 12, innerWidth - node.offsetWidth - 8)) + "px";
  node.style.top = (y + 18 + node.offsetHeight > innerHeight ? y - node.offsetHeight - 10 : y + 18) + "px";
}

