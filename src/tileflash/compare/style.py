"""The style sheet of the HTML report."""

STYLE = """\
:root {
  color-scheme: light dark;
  --paper: #ffffff; --panel: #f5f6f9; --ink: #1f2430; --quiet: #5b6372; --rule: #d9dde5;
  --baseline: #c2570c; --flash: #1d5fd1; --good: #13713b; --bad: #b42318; --lead: #edf3fd;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171d; --panel: #1c2028; --ink: #e6e9ef; --quiet: #a2abba; --rule: #343b48;
    --baseline: #f0955a; --flash: #78aaff; --good: #62cf90; --bad: #ff8f84; --lead: #1b2536;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "PingFang SC", "Noto Sans CJK SC",
    "Microsoft YaHei", sans-serif;
}
main { max-width: 68rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: clamp(1.4rem, 1.1rem + 1.6vw, 2.1rem); line-height: 1.2; margin: 0 0 .3rem; text-wrap: balance; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .7rem; padding-top: .9rem; border-top: 1px solid var(--rule); }
h3 { font-size: 1.05rem; margin: 1.6rem 0 .5rem; }
p, ul { max-width: 46rem; margin: .6rem 0; }
li { margin: .35rem 0; }
.subtitle, .note, figcaption, small { color: var(--quiet); }
.subtitle { margin-top: 0; }
.flag { white-space: nowrap; }
.note { font-size: .92em; }
.lead {
  max-width: none; margin: 1.2rem 0; padding: .9rem 1.1rem; font-size: 1.08rem;
  background: var(--lead); border-left: 4px solid var(--flash); border-radius: 0 6px 6px 0;
}
.warning { padding: .6rem .9rem; border-left: 4px solid var(--bad); background: var(--panel); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: .1rem 2rem; margin: .6rem 0; }
dl div { display: flex; gap: .8rem; padding: .3rem 0; border-bottom: 1px solid var(--rule); }
dt { flex: 0 0 8.5rem; color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
pre {
  margin: .6rem 0; padding: .8rem 1rem; overflow-x: auto; background: var(--panel); border-radius: 6px;
  font: .85rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere;
}
.scroll { overflow-x: auto; margin: .8rem 0; border: 1px solid var(--rule); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .93rem; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .7rem; text-align: left; vertical-align: top; }
th { font-weight: 600; font-size: .9em; color: var(--quiet); background: var(--panel); vertical-align: bottom; }
td { white-space: nowrap; }
.number { text-align: right; }
tr.group td { border-top: 1px solid var(--rule); }
tr:not(.group) td:first-child { color: transparent; user-select: none; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper); }
th:first-child { background: var(--panel); }
td small { display: block; font-size: .84em; line-height: 1.3; }
.good { color: var(--good); font-weight: 600; }
.bad, .oom { color: var(--bad); font-weight: 600; }
.missing { color: var(--quiet); }
td small { font-weight: 400; }
.plots { display: grid; gap: 1rem; margin: 1rem 0; }
.two { grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.three { grid-template-columns: repeat(auto-fit, minmax(min(100%, 19.5rem), 1fr)); }
figure { margin: 0; padding: .6rem; border: 1px solid var(--rule); border-radius: 6px; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; max-width: 34rem; margin: 0 auto; }
figure svg text { font-family: inherit !important; }
figcaption { font-size: .88em; text-align: center; padding-top: .3rem; }
@media (max-width: 40rem) {
  body { font-size: 15px; }
  main { padding: 1rem .8rem 3rem; }
  th, td { padding: .4rem .5rem; }
  dt { flex-basis: 7.5rem; }
}
@media print {
  :root {
    --paper: #fff; --panel: #f3f3f3; --ink: #000; --quiet: #444; --rule: #bbb;
    --baseline: #c2570c; --flash: #1d5fd1; --good: #13713b; --bad: #b42318; --lead: #f3f3f3;
  }
  @page { margin: 14mm; }
  body { font-size: 10pt; }
  main, p, ul { max-width: none; }
  main { padding: 0; }
  .scroll { overflow: visible; border: 0; }
  table { font-size: 8pt; }
  th, td { padding: .25rem .4rem; position: static !important; }
  .two { grid-template-columns: 1fr 1fr; }
  .three { grid-template-columns: 1fr 1fr 1fr; }
  h2, h3 { break-after: avoid; }
  tr, figure, .lead { break-inside: avoid; }
}
"""
