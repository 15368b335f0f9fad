# ruff: noqa: E501  (a stylesheet has long lines)
"""The page's style: one palette for light and one for dark, a column that fits a phone, and rules for paper."""

CSS = """
:root{--paper:#fbfaf8;--card:#fff;--ink:#1d1f24;--muted:#676c77;--grid:#dfdfe4;--line:#e7e5e1;--first:#0072b2;
--second:#d55e00;--warn:#b4005a;--less:213,94,0;--more:0,114,178;--calm:#0b7a53;--watch:#9a6400;--alarm:#b3261e;
--soft:#f1efeb}
@media (prefers-color-scheme:dark){:root{--paper:#14161a;--card:#1c1f25;--ink:#e9e9ec;--muted:#9ba1ad;--grid:#363b45;
--line:#2b2f37;--first:#56b4e9;--second:#f0924c;--warn:#f178b6;--less:240,130,50;--more:86,180,233;--calm:#57c99a;
--watch:#e8b04b;--alarm:#ff8a80;--soft:#23272e}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
body{margin:0 auto;max-width:1120px;padding:0 20px 60px;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:clamp(1.5rem,4.2vw,2.4rem);line-height:1.2;letter-spacing:-.02em;margin:.2em 0 .5em;font-weight:680;
text-wrap:balance}
h2{font-size:1.35rem;letter-spacing:-.01em;margin:2.6em 0 .8em;scroll-margin-top:64px}
h3{font-size:1rem;margin:0 0 .5em}
header{margin:36px 0 8px;padding:26px 28px;background:var(--card);border:1px solid var(--line);
border-left:6px solid var(--tone);border-radius:14px}
.calm{--tone:var(--calm)}.watch{--tone:var(--watch)}.alarm{--tone:var(--alarm)}
.badge{display:inline-block;padding:.12em .55em;margin-right:.2em;border-radius:99px;background:var(--tone);color:var(--card);
font-size:.42em;font-weight:700;letter-spacing:.06em;text-transform:uppercase;vertical-align:.45em}
.eyebrow{margin:0;color:var(--muted);font-size:.86rem;overflow-wrap:anywhere}
.verdict{padding-left:0;list-style:none;margin:0}.verdict li{margin:.35em 0;max-width:78ch}
.runs{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr))}
nav{position:sticky;top:0;z-index:2;display:flex;gap:4px;overflow-x:auto;padding:8px 0;background:var(--paper);
border-bottom:1px solid var(--line)}
nav a{white-space:nowrap;padding:.35em .8em;border-radius:99px;color:var(--muted);text-decoration:none;font-size:.9rem}
nav a:hover{background:var(--soft);color:var(--ink)}
a:focus-visible,summary:focus-visible,[tabindex]:focus-visible{outline:2px solid var(--first);outline-offset:2px;
border-radius:4px}
.skip{position:absolute;left:-999px}.skip:focus{left:12px;top:8px;background:var(--card);padding:.4em .8em;z-index:3}
.card{background:var(--card);border:1px solid var(--line);border-left:4px solid var(--alarm);border-radius:12px;
padding:18px 20px;margin:0 0 14px}.card.good{border-left-color:var(--calm)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.3em 1em;margin:0 0 .6em}dt{color:var(--muted)}dd{margin:0}
.quiet,.note{color:var(--muted);font-size:.92rem;max-width:78ch}.note{color:var(--watch)}
.tiles{display:grid;gap:12px;grid-template-columns:repeat(auto-fill,minmax(min(100%,165px),1fr));margin-bottom:14px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:14px 16px;min-width:0}
.tile code{font-size:.74rem;color:var(--muted);background:none;padding:0;overflow-wrap:anywhere}
.tile strong{display:flex;flex-wrap:wrap;gap:0 .6em;font-size:1.5rem;font-weight:640;line-height:1.3;letter-spacing:-.02em;
font-variant-numeric:tabular-nums}.tile small{color:var(--muted);font-size:.78rem;line-height:1.3;display:block}
.run1{color:var(--second)}
.grid{display:grid;gap:14px;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr))}
figure{margin:0 0 4px;background:var(--card);border:1px solid var(--line);border-radius:12px;padding:14px 14px 8px;
max-width:520px}
figcaption{font-size:.88rem;font-weight:600;margin-bottom:.3em}
figure svg{display:block;width:100%;height:auto;font-family:inherit}
details{margin:.5em 0 1em}summary{cursor:pointer;color:var(--muted);font-size:.9rem}
code{font:.9em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;background:var(--soft);padding:.1em .35em;
border-radius:5px;overflow-wrap:anywhere}
pre{font:.86rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;background:var(--soft);border-radius:8px;
padding:12px 14px;overflow-x:auto;margin:.7em 0 0;white-space:pre}
pre.text{white-space:pre-wrap;overflow-wrap:anywhere;max-height:420px;overflow-y:auto}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:12px;background:var(--card);max-height:640px}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.5em .8em;border-bottom:1px solid var(--line);vertical-align:top}
thead th{position:sticky;top:0;background:var(--card);color:var(--muted);font-weight:600;white-space:nowrap}
tbody tr:last-child>*{border-bottom:0}tbody th{font-weight:600;white-space:nowrap}
.configs td{white-space:nowrap}.configs td:last-child{white-space:normal;min-width:240px}
.sequence{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:16px 18px;margin:0 0 14px}
.tokens{font:.84rem/2 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;margin:.5em 0 0;overflow-wrap:anywhere}
.tokens span{position:relative;border-radius:4px;padding:.16em .22em;cursor:default;white-space:pre-wrap}
.less{background:rgba(var(--less),calc(var(--s,0)*.75))}.more{background:rgba(var(--more),calc(var(--s,0)*.75))}
.masked{color:var(--muted);opacity:.6}
.tokens span:hover::after,.tokens span:focus::after{content:attr(data-tip);position:fixed;left:50%;bottom:18px;
transform:translateX(-50%);z-index:5;width:max-content;max-width:min(92vw,420px);padding:10px 14px;border-radius:10px;
background:var(--ink);color:var(--paper);font:.84rem/1.5 ui-monospace,Menlo,Consolas,monospace;white-space:pre;
box-shadow:0 6px 24px rgba(0,0,0,.28);pointer-events:none}
footer{margin-top:48px;padding-top:16px;border-top:1px solid var(--line);color:var(--muted);font-size:.86rem}
li{overflow-wrap:anywhere}
@media (max-width:560px){body{padding:0 12px 40px}header{padding:18px 16px;margin-top:14px}dl{grid-template-columns:1fr}
dt{margin-top:.4em}}
@media print{:root{--paper:#fff;--card:#fff;--ink:#000;--muted:#444;--grid:#ccc;--line:#ccc;--first:#0072b2;
--second:#d55e00;--less:213,94,0;--more:0,114,178;--soft:#f4f4f4}nav,.skip{display:none}body{max-width:none}
.scroll,pre.text{max-height:none;overflow:visible}table{font-size:.7rem}th,td{padding:.25em .4em}pre{white-space:pre-wrap}
.card,.tile,figure,.sequence{break-inside:avoid}*{-webkit-print-color-adjust:exact;print-color-adjust:exact}
details::details-content{content-visibility:visible;display:block}}
"""
