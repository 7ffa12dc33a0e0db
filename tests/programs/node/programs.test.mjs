import test from 'node:test';
import assert from 'node:assert/strict';
import { Worker } from 'node:worker_threads';
import { execFile, fork, spawn, spawnSync } from 'node:child_process';
import { promisify } from 'node:util';
import { once } from 'node:events';
import { pipeline } from 'node:stream/promises';
import http from 'node:http';
import http2 from 'node:http2';
import net from 'node:net';
import dgram from 'node:dgram';
import dns from 'node:dns/promises';
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import zlib from 'node:zlib';
import crypto from 'node:crypto';
import cluster from 'node:cluster';

const place = fs.mkdtempSync(path.join(os.tmpdir(), 'node-'));

if (cluster.isWorker) {
  http.createServer((_, answer) => answer.end(String(process.pid))).listen(Number(process.env.PORT), '127.0.0.1');
} else if (process.argv[2] === 'child') {
  process.on('message', (m) => { process.send({ twice: m.n * 2 }); process.disconnect(); });
} else {
  test('eight workers add', async () => {
    const code = 'const {parentPort, workerData} = require("worker_threads"); let s = 0; for (let i = 0; i < 1e6; i++) s += i; parentPort.postMessage(s + workerData)';
    const sums = await Promise.all([...Array(8).keys()].map(async (n) => (await once(new Worker(code, { eval: true, workerData: n }), 'message'))[0]));
    assert.equal(sums[7] - sums[0], 7);
  });
  test('shared memory and Atomics between workers', async () => {
    const shared = new SharedArrayBuffer(4);
    const worker = new Worker('const a = new Int32Array(require("worker_threads").workerData); Atomics.store(a, 0, 7); Atomics.notify(a, 0)', { eval: true, workerData: shared });
    await once(worker, 'exit');
    assert.equal(new Int32Array(shared)[0], 7);
  });
  test('children: execFile, shell, exit codes, signals', async () => {
    assert.equal((await promisify(execFile)('echo', ['ä你'])).stdout, 'ä你\n');
    assert.equal(spawnSync('exit 7', { shell: true }).status, 7);
    const child = spawn('sleep', ['100']);
    child.kill('SIGTERM');
    assert.deepEqual(await once(child, 'exit'), [null, 'SIGTERM']);
    assert.equal(spawnSync('sleep', ['100'], { timeout: 100 }).error.code, 'ETIMEDOUT');
  });
  test('fork with a channel', async () => {
    const child = fork(process.argv[1], ['child']);
    child.send({ n: 21 });
    assert.equal((await once(child, 'message'))[0].twice, 42);
  });
  test('a cluster listens on one port', async () => {
    const free = net.createServer().listen(0, '127.0.0.1');
    await once(free, 'listening');
    const { port } = free.address();
    free.close();
    cluster.setupPrimary({ exec: process.argv[1] });
    const workers = [0, 1].map(() => cluster.fork({ PORT: String(port) }));
    await Promise.all(workers.map((w) => once(w, 'listening')));
    assert.match(await (await fetch(`http://127.0.0.1:${port}/`)).text(), /^\d+$/);
    for (const worker of workers) { worker.kill(); await once(worker, 'exit'); }
  });
  test('fs.watch and fs.watchFile see changes', async () => {
    const watcher = fs.watch(place);
    setTimeout(() => fs.writeFileSync(path.join(place, 'seen'), 'x'), 50);
    const [, name] = await once(watcher, 'change');
    assert.equal(name, 'seen');
    watcher.close();
  });
  test('HTTP on loopback with keep-alive, a body and streams', async () => {
    const server = http.createServer((request, answer) => pipeline(request, zlib.createGzip(), answer));
    await once(server.listen(0, '127.0.0.1'), 'listening');
    const body = crypto.randomBytes(1 << 20);
    const answer = await fetch(`http://127.0.0.1:${server.address().port}/`, { method: 'POST', body });
    assert.deepEqual(zlib.gunzipSync(Buffer.from(await answer.arrayBuffer())), body);
    server.close();
    server.closeAllConnections?.();
  });
  test('HTTP by the name localhost and by IPv6', async () => {
    for (const host of ['localhost', '::1']) {
      const server = http.createServer((_, answer) => answer.end('ok'));
      await once(server.listen(0, host), 'listening');
      const url = `http://${host.includes(':') ? `[${host}]` : host}:${server.address().port}/`;
      assert.equal(await (await fetch(url)).text(), 'ok');
      server.close();
      server.closeAllConnections?.();
    }
  });
  test('HTTP/2 without TLS', async () => {
    const server = http2.createServer();
    server.on('stream', (stream) => stream.end('two'));
    await once(server.listen(0, '127.0.0.1'), 'listening');
    const client = http2.connect(`http://127.0.0.1:${server.address().port}`);
    let text = '';
    for await (const part of client.request({ ':path': '/' })) text += part;
    assert.equal(text, 'two');
    client.close();
    server.close();
  });
  test('sockets of UNIX, abstract too', async () => {
    for (const name of [path.join(place, 'socket'), '\0corral-node']) {
      const server = net.createServer((socket) => socket.pipe(socket)).listen(name);
      await once(server, 'listening');
      const client = net.connect(name);
      client.write('echo');
      assert.equal(String((await once(client, 'data'))[0]), 'echo');
      client.destroy();
      server.close();
    }
  });
  test('UDP', async () => {
    const socket = dgram.createSocket('udp4').bind(0, '127.0.0.1');
    await once(socket, 'listening');
    socket.send('x', socket.address().port, '127.0.0.1');
    assert.equal(String((await once(socket, 'message'))[0]), 'x');
    socket.close();
  });
  test('names: localhost resolves, an unknown one fails soon', { timeout: 20000 }, async () => {
    assert.ok((await dns.lookup('localhost')).address);
    await assert.rejects(dns.lookup('no-such-name.invalid'));
  });
  test('os: user, host name, processors, memory, interfaces', () => {
    assert.ok(os.userInfo().username && os.hostname() && os.cpus().length && os.totalmem() && os.networkInterfaces().lo);
    assert.equal(os.userInfo().uid, process.getuid());
  });
  test('crypto: keys, hashes, random', () => {
    const { publicKey, privateKey } = crypto.generateKeyPairSync('rsa', { modulusLength: 2048 });
    assert.ok(crypto.verify('sha256', Buffer.from('x'), publicKey, crypto.sign('sha256', Buffer.from('x'), privateKey)));
  });
  test('files: copy, links, times, 5 000 at once, a large one', async () => {
    const many = path.join(place, 'many');
    fs.mkdirSync(many);
    await Promise.all([...Array(5000).keys()].map((n) => fs.promises.writeFile(path.join(many, `f${n}`), '')));
    assert.equal(fs.readdirSync(many).length, 5000);
    fs.copyFileSync(process.execPath, path.join(place, 'copy'));
    fs.symlinkSync('copy', path.join(place, 'link'));
    assert.equal(fs.realpathSync(path.join(place, 'link')), fs.realpathSync(path.join(place, 'copy')));
    fs.rmSync(place, { recursive: true });
  });
  test('locale and time zone', () => {
    assert.equal(new Intl.DateTimeFormat('de', { timeZone: 'Asia/Tokyo', hour: 'numeric', hour12: false }).format(0).slice(0, 2), '09');
    process.env.TZ = 'America/New_York';
    assert.equal(new Date(0).getHours(), 19);
  });
}
