-- Moves a key away that stands in place of one of ours and is of another type, as a whole, and notes it as a dead letter.
--
-- KEYS   1 the key, 2 dead letters, 3 where it goes
-- ARGV   the type it should have, group to make in its place ('': none), most bytes of a string to put into the letter,
--        how long it is kept, in ms
-- Returns  the type that was found, nil where it is right or nothing stands there
local call = redis.call
local kind = call('TYPE', KEYS[1]).ok
if kind == 'none' or kind == ARGV[1] then return false end
local value = ''
if kind == 'string' then value = call('GETRANGE', KEYS[1], 0, ARGV[3] - 1) end
call('RENAME', KEYS[1], KEYS[3])
call('PEXPIRE', KEYS[3], ARGV[4])
call('XADD', KEYS[2], '*', 'attempts', 1, 'reason', 'a ' .. kind .. ' stood in place of this ' .. ARGV[1],
  'from', KEYS[1], 'id', '', 't', kind, 'd', value, 'displaced', KEYS[3])
if ARGV[2] ~= '' then call('XGROUP', 'CREATE', KEYS[1], ARGV[2], '0', 'MKSTREAM') end
return kind
